"""Jobs that prefer a worker: left to it for a while, and to everybody when it is gone, full, or behind."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, status, wait_replies, worker
from support.specimens.messages import job, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, GenerateJob, InvalidField, Lease, Release
from rolloutmq.messages.redis.keys import later_member
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


async def test_who_has_no_lease_is_not_preferred(broker: Broker, joined: Any, expire_lease: Any) -> None:
    one, other = await joined("w1"), await joined("w2")
    unknown, gone = sticky("nobody"), sticky()
    await expire_lease(one)
    await broker.enqueue([unknown, gone])
    assert await ids(other) == [unknown.id, gone.id]


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


async def test_a_dead_workers_jobs_are_everybodys(broker: Broker, joined: Any, expire_lease: Any, db: Redis) -> None:
    dying, other = await joined("w1"), await joined("w2")
    running, waiting = sticky(), sticky()
    await broker.enqueue([running])
    assert await ids(dying) == [running.id]
    await broker.enqueue([waiting])
    assert await ids(other) == []
    await expire_lease(dying)
    await other.reap(3)
    assert await ids(other) == [running.id, waiting.id], "by their turns; an attempt that was lost prefers nobody"
    assert await db.zcard(broker.keys.prefers) == 0


async def test_a_worker_that_leaves_is_not_waited_for(broker: Broker, joined: Any) -> None:
    leaving, other = await joined("w1"), await joined("w2")
    mine = sticky()
    await broker.enqueue([mine])
    assert await ids(other) == []
    assert await leaving.leave() == 0
    await other.reap(3)
    assert await ids(other) == [mine.id]


async def test_what_is_handed_back_prefers_nobody(broker: Broker, joined: Any) -> None:
    one, other = await joined("w1"), await joined("w2")
    mine = sticky()
    await broker.enqueue([mine])
    await one.claim(1, 1, 0)
    await one.release([Release(mine.id, 1)], 3)
    assert await ids(other) == [mine.id]


async def test_weights_come_before_preference(broker: Broker, joined: Any, db: Redis) -> None:
    behind, ahead = await joined("w1"), await joined("w2")
    mine = sticky(min_version=2)
    await broker.enqueue([mine])
    assert await ids(ahead, version=2) == [], "left to the one it prefers"
    assert await ids(behind, version=1) == [], "which is not as far"
    assert await db.zscore(broker.keys.later[1], later_member(0, mine.id)) == 2
    assert await ids(behind, version=2) == [mine.id]


async def test_priorities_hold(broker: Broker, joined: Any) -> None:
    one, other = await joined("w1"), await joined("w2")
    low, high = sticky(priority="low"), sticky(priority="high")
    normal = job()
    await broker.enqueue([low, high])
    assert await ids(other) == []
    await broker.enqueue([normal])
    assert await ids(one) == [high.id, normal.id, low.id]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_it_can_end_while_it_waits(broker: Broker, joined: Any, db: Redis, end: str) -> None:
    await joined("w1")
    other = await joined("w2")
    mine = sticky(deadline_s=60.0)
    await broker.enqueue([mine])
    assert await ids(other) == []
    if end == "cancel":
        await broker.cancel([mine.id])
    else:
        await db.hset(broker.keys.job(mine.id), "e", 1)
        await db.zadd(broker.keys.deadlines, {mine.id: 1})
        assert await broker.end_overdue() == 1
    assert await db.exists(broker.keys.prefers, broker.keys.later[1]) == 0
    (reply,) = await wait_replies(broker, 1)
    assert not reply.outcome.ok


async def test_a_suspect_prefers_nobody(broker: Broker, joined: Any, expire_lease: Any) -> None:
    mine = sticky("w3")
    await broker.enqueue([mine])
    for name in ("w1", "w2"):
        lease = await joined(name)
        assert await ids(lease) == [mine.id]
        await expire_lease(lease)
        await (await joined(f"{name}-reaper")).reap(3)
    await joined("w3")
    assert await ids(await joined("w4")) == [mine.id]


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
        await eventually(lambda: full.worker._generation.running)
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
