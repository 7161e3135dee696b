"""A worker whose machine will be taken away: what it holds goes to the next one, token for token, and is no loss."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from chaos.habits import Options
from chaos.processes import WorkerProcess
from support.pools.clouds import played_cloud
from support.pools.pool import check_scripted, eventually, record, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

LONG = SamplingParams(max_new_tokens=2000)


async def test_processes_hand_over_token_for_token_and_without_a_loss(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    jobs = [job(n=2, sampling=LONG) for _ in range(3)]
    async with played_cloud() as cloud:
        config: dict[str, Any] = {"spot": "gcp", "spot_endpoint": cloud.url, "max_lost": 1, "drain_s": 600.0}
        first = await WorkerProcess.launch(redis_db, tmp_path / "first", Options(config=config, tokens_per_s=100.0))
        try:
            await first.joined()
            await broker.enqueue(jobs)
            await eventually(lambda: _running(broker, 6))
            cloud.notice()
            assert await first.ended(60) == 0
        finally:
            await first.kill()
    load = await broker.load()
    assert (sum(load.queued), load.open_jobs, load.leases_lost, load.dead) == (3, 3, 0, 0)
    assert await broker.workers() == []
    for one in jobs:
        assert b"c" not in await record(broker, one.id), "it counts as a loss"
    second = await WorkerProcess.launch(redis_db, tmp_path / "second", Options(config={"max_lost": 1}))
    try:
        found = [reply.outcome for reply in await wait_replies(broker, 6)]
        for result in found:
            assert (result.worker_id, result.attempt, len(result.token_ids)) == (second.id, 2, 2000)
            assert result.legs[0] > 0, "the tokens of the first worker are in it"
            check_scripted(result, 3)
    finally:
        await second.kill()


async def _running(broker: Broker, samples: int) -> bool:
    return sum(one.running for one in await broker.workers()) == samples


async def test_a_notice_cuts_a_drain_short(redis_db: str, broker: Broker) -> None:
    async with played_cloud() as cloud:
        spot = {"spot": "gcp", "spot_endpoint": cloud.url}
        async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), drain_s=600.0, **spot) as running:
            await broker.enqueue([job(sampling=LONG)])
            await eventually(lambda: running.generation.running)
            running.worker.drain()
            await eventually(lambda: running.generation.gate.reasons == ["drain"])
            cloud.notice()
            await running.task
    assert (await broker.load()).open_jobs == 1


async def test_a_notice_while_the_engine_starts_ends_the_start(redis_db: str, broker: Broker) -> None:
    async with played_cloud() as cloud:
        config = WorkerConfig(redis_url=redis_db, spot="gcp", spot_endpoint=cloud.url)
        engine = ScriptedEngine(start_s=600.0)
        running = asyncio.create_task(Worker(config, engine, NoTokenizer()).run())
        await eventually(lambda: cloud.asked >= 2)
        cloud.notice()
        await running
    assert (engine.starts, await broker.workers()) == (0, [])


class Receiving(ScriptedEngine):
    """An engine that is receiving weights, for ever."""

    receives = False

    async def prepare_weights(self, order: Any) -> Any:
        self.receives = True
        await asyncio.Event().wait()


async def test_a_notice_while_weights_are_received_is_heeded(redis_db: str, broker: Broker) -> None:
    from support.peers.publishing import WEIGHTS, publisher  # noqa: PLC0415 – torch

    one, engine = job(sampling=LONG), Receiving(tokens_per_s=50.0)
    async with played_cloud() as cloud, publisher(redis_db, join_timeout_s=0.5, transfer_timeout_s=0.5) as source:
        spot = {"spot": "gcp", "spot_endpoint": cloud.url}
        async with worker(redis_db, engine=engine, drain_s=600.0, max_lost=1, **spot) as running:
            await broker.enqueue([one])
            await eventually(lambda: running.generation.running)
            transfer = source.publish(1, WEIGHTS.items())
            await eventually(lambda: engine.receives)
            cloud.notice()
            await running.task
        await asyncio.to_thread(transfer.wait, 60)
    assert (await broker.load()).open_jobs == 1
    assert b"c" not in await record(broker, one.id), "it counts as a loss"


async def test_a_process_that_gets_sigterm_twice_drains_once(redis_db: str, broker: Broker, tmp_path: Path) -> None:
    options = Options(config={"max_lost": 1, "drain_s": 3.0}, tokens_per_s=100.0)
    one = job(sampling=LONG)
    process = await WorkerProcess.launch(redis_db, tmp_path / "log", options)
    try:
        await process.joined()
        await broker.enqueue([one])
        await eventually(lambda: _running(broker, 1))
        process.signal(signal.SIGTERM)
        process.signal(signal.SIGTERM)
        assert await process.ended(60) == 0
    finally:
        await process.kill()
    async with worker(redis_db) as second:
        (reply,) = await wait_replies(broker, 1)
        assert (reply.outcome.worker_id, reply.outcome.attempt) == (second.id, 2)
        check_scripted(reply.outcome, 3)
