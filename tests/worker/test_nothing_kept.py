"""A worker keeps nothing of a sample that it has published."""

from __future__ import annotations

import gc
from collections import Counter

from redis.asyncio import Redis
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT, job

from rolloutmq.messages import Broker

JOBS = 250


def objects() -> Counter[str]:
    """Objects of this process that are watched by the garbage collector, by type."""
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects())


async def test_no_kind_of_object_grows_with_the_samples(redis_db: str, broker: Broker, db: Redis) -> None:
    async with worker(redis_db, max_running=64) as running:

        async def round_of_jobs() -> Counter[str]:
            before = running.generation.finished
            await broker.enqueue([job(n=2, sampling=SHORT, stream=i % 2 == 0) for i in range(JOBS)])
            done = before + 2 * JOBS
            await eventually(lambda: running.generation.finished == done and not running.status.held, 60)
            await eventually(lambda: not running.worker._saving._streamed, 60)
            await db.delete(broker.keys.reply("client"), broker.keys.news("client"))
            return objects()

        await round_of_jobs()
        before = await round_of_jobs()
        grown = (await round_of_jobs()) - before
    assert {name: count for name, count in grown.items() if count >= JOBS // 2} == {}
