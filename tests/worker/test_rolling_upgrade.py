"""One version of the image leaves a pool while another joins, forth and back: nothing is lost, old clients read on."""

from __future__ import annotations

from pathlib import Path

from chaos.habits import Options
from chaos.processes import WorkerProcess
from support.pools.pool import check_scripted, eventually, wait_replies
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.messages.codec import MINOR

SAMPLES = 8


async def test_workers_of_two_minor_versions_hand_over_to_each_other(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    """The newer ones write a field into every message (status, saved pieces, results) that nobody else knows.

    This process is the older client: what it submits and reads is of today's minor version.
    """
    config = {"max_lost": 1, "drain_s": 0.0}
    old = Options(config=config, tokens_per_s=100.0)
    new = Options(config=config, minor=MINOR + 1, tokens_per_s=100.0)
    jobs = [job(n=2, sampling=SamplingParams(max_new_tokens=2000)) for _ in range(SAMPLES // 2)]
    started: list[WorkerProcess] = []

    async def take_over(options: Options) -> None:
        """A worker joins; the one before it leaves; all samples run on the new one."""
        started.append(await WorkerProcess.launch(redis_db, tmp_path / f"{len(started)}", options))
        await started[-1].joined()
        if len(started) == 1:
            await broker.enqueue(jobs)
        else:
            assert await started[-2].drain(60) == 0
        await eventually(lambda: runs_on(started[-1].id))

    async def runs_on(worker_id: str) -> bool:
        there = await broker.workers()  # whichever version wrote their status
        return [(one.worker_id, one.running) for one in there] == [(worker_id, SAMPLES)]

    try:
        for options in (old, new, old):
            await take_over(options)
        last = Options(config=config, minor=MINOR + 1)  # at once
        started.append(await WorkerProcess.launch(redis_db, tmp_path / "last", last))
        await started[-1].joined()
        assert await started[-2].drain(60) == 0
        found = [reply.outcome for reply in await wait_replies(broker, SAMPLES)]
    finally:
        for process in started:
            await process.kill()
    for result in found:
        assert (result.worker_id, result.attempt, len(result.token_ids)) == (started[-1].id, 4, 2000)
        assert len(result.legs) == 3, "each went on where the one before it had stopped"
        check_scripted(result, 3)
    load = await broker.load()
    assert (load.accepted, load.done, load.dead, load.leases_lost) == (len(jobs), len(jobs), 0, 0)
