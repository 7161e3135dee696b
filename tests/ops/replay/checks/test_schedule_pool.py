"""The schedule of a real pool: a worker is lost midway, and another one goes on."""

from __future__ import annotations

from pathlib import Path

from redis.asyncio import Redis
from support.pools.commanded import slow
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT

from rolloutmq import GenerateJob, RolloutClient, SamplingParams
from rolloutmq.messages import Broker
from rolloutmq.messages.journal import read
from rolloutmq.ops.replay.checks import EVENTS, schedule_of


async def test_a_worker_that_was_lost_breaks_no_promise(
    redis_db: str, broker: Broker, db: Redis, tmp_path: Path
) -> None:
    journal = str(tmp_path)
    endless = GenerateJob(token_ids=[5, 6], sampling=SamplingParams(max_new_tokens=100_000))
    short = [GenerateJob(token_ids=[5, number], n=2, sampling=SHORT) for number in range(3)]
    async with RolloutClient(redis_db, client_id="run", journal=journal) as client:
        async with worker(redis_db, engine=slow(), checkpoint_s=0.1, journal=journal) as lost:
            handle = await client.submit(endless)
            await eventually(lambda: db.hexists(broker.keys.job(handle.job_id), "k0"))
            first = lost.id
            await lost.die()
        async with worker(redis_db, engine=slow(), journal=journal) as other:
            await eventually(lambda: other.worker._held.unpublished)
            await client.stop([handle])
            (ended,) = await client.wait(handle, 60)
            for each in await client.submit_many(short):
                await client.wait(each, 60)
    assert ended.attempt >= 2
    found = schedule_of(read(journal, events=EVENTS))
    assert found.violations == []
    assert found.workers.keys() >= {first, ended.worker_id}
    assert found.outcomes["attempt claimed"] >= 5
    assert found.outcomes["result"] == 7
    assert all(one.busy_s <= one.span_s for one in found.workers.values())
    assert found.workers[ended.worker_id].busy_s > 0  # the lost one may have died before it wrote what it had saved
