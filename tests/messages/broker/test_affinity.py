"""Jobs that prefer a worker: left to it for a while, and to everybody when it is gone, full, or behind."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, status, worker
from support.specimens.messages import job, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, GenerateJob, InvalidField, Lease
from rolloutmq.worker.lease import claims
from rolloutmq.worker.scripted.engine import ScriptedEngine


def sticky(to: str = "w1", seconds: float = 30.0, **fields: Any) -> GenerateJob:
    return job(prefer_worker=to, prefer_s=seconds, **fields)


async def ids(lease: Lease, version: int = 0) -> list[str]:
    return [claim.job_id for claim in await lease.claim(8, 99, version)]


async def lapse(db: Redis, broker: Broker, one: GenerateJob) -> None:
    """As if the time were over for which a job is left to the worker it prefers."""
    await db.hincrby(broker.keys.job(one.id), "t", -60_000)
    await db.zadd(broker.keys.prefers, {one.id: 1}, xx=True)


async def test_it_is_left_to_the_worker_it_prefers(broker: Broker, joined: Any, db: Redis) -> None:
    one, other = await joined("w1"), await joined("w2")
    mine, any_one = sticky(), job()
    await broker.enqueue([mine, any_one])
    assert await ids(other) == [any_one.id], "and does not hold up what is behind it"
    assert await db.zcard(broker.keys.prefers) == 1
    assert await db.lrange(broker.keys.token("w1"), 0, -1) == [b"1"], "it is told"
    assert await ids(other) == []
    assert await ids(one) == [mine.id]
    assert await db.zcard(broker.keys.prefers) == 0


async def test_the_preferred_worker_needs_no_detour(broker: Broker, joined: Any, db: Redis) -> None:
    one = await joined("w1")
    mine = sticky()
    await broker.enqueue([mine])
    assert await ids(one) == [mine.id]
    assert b"number" not in await db.hkeys(broker.keys.worker("w1"))


async def test_its_time_is_bounded(broker: Broker, joined: Any, db: Redis) -> None:
    await joined("w1")
    other = await joined("w2")
    mine = [sticky() for _ in range(3)]
    behind = job()
    await broker.enqueue(mine)
    assert await ids(other) == []
    await broker.enqueue([behind])
    for one in mine:
        await lapse(db, broker, one)
    assert await other.reap(3) == (0, 0, 0, 0)
    assert await ids(other) == [*(one.id for one in mine), behind.id], "in front of what came later, in their order"
    late = sticky()
    await broker.enqueue([late])
    await lapse(db, broker, late)
    assert await ids(other) == [late.id], "found in its queue when its time is over"


async def test_an_idle_worker_is_woken(
    redis_db: str, client: RolloutClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of the two looks again by itself in this test: whoever takes the token passes the job on."""
    monkeypatch.setattr(claims, "WAKE_S", 25)
    async with worker(redis_db) as one, worker(redis_db) as other:
        for turn in range(20):
            chosen = (one, other)[turn % 2]
            (result,) = await client.wait(await client.submit(tokens(prefer_worker=chosen.id, prefer_s=30.0)), 10)
            assert result.worker_id == chosen.id


async def test_a_full_worker_is_not_waited_for(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), max_running=1, prefetch=0) as full:
        busy = await client.submit(tokens())
        await eventually(lambda: full.generation.running)
        async with worker(redis_db) as free:
            (result,) = await client.wait(await client.submit(tokens(prefer_worker=full.id, prefer_s=0.1)), 10)
            assert result.worker_id == free.id
            await client.cancel([busy])


async def test_status_and_reported_names(broker: Broker, joined: Any) -> None:
    """What a result says of its worker is what a job may prefer."""
    lease: Lease = await joined("host-1-ab")
    assert [found.worker_id for found in await broker.workers()] == ["host-1-ab"]
    assert status(lease.worker_id).worker_id == lease.worker_id
    with pytest.raises(InvalidField, match="prefer_s"):
        GenerateJob.build(token_ids=[1], prefer_worker="w", prefer_s=61.0)
    with pytest.raises(InvalidField, match="prefer_worker"):
        GenerateJob.build(token_ids=[1], prefer_worker="")
