"""Who looks for dead workers and for jobs that nobody was woken for, alone and in a crowd."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import status
from support.specimens.messages import job

from rolloutmq.messages import Broker, Release


async def test_of_a_crowd_a_few_reap(broker: Broker, joined: Any) -> None:
    async def clock() -> int:
        return int(await broker.redis.hget(broker.keys.clock, "at"))

    crowd = [await joined(f"w{number}") for number in range(50)]
    began = await clock()
    reaped = [(await lease.heartbeat(status(lease.worker_id))).reaps for lease in crowd]
    assert sum(reaped) <= 1 + (await clock() - began) // 200  # of the milliseconds that have passed one in 200


async def test_a_worker_that_beats_once_a_second_always_reaps(broker: Broker, db: Redis, joined: Any) -> None:
    lease = await joined()
    for _ in range(3):
        await db.hincrby(broker.keys.clock, "reaped", -1000)  # a second later
        assert (await lease.heartbeat(status("w1"))).reaps


async def test_a_clock_that_began_again_holds_up_no_reaping(broker: Broker, db: Redis, joined: Any) -> None:
    lease = await joined()
    await db.hset(broker.keys.clock, "reaped", 10**14)
    assert (await lease.heartbeat(status("w1"))).reaps


@pytest.mark.parametrize("kind", ["queued", "suspect"])
async def test_a_token_that_was_lost_with_its_taker_is_put_back(
    broker: Broker, db: Redis, joined: Any, kind: str
) -> None:
    """Idle workers wait for it, and look at nothing meanwhile."""
    lease = await joined()
    await broker.enqueue([job()])
    if kind == "suspect":
        (claim,) = await lease.claim(1, 1, 0)
        await lease.release([Release(claim.job_id, claim.attempt, lost=True)], max_lost=2)
        assert await db.llen(broker.keys.suspects) == 1
    assert await db.lpop(broker.keys.wake)
    await lease.reap(3)
    await lease.reap(3)
    assert await db.llen(broker.keys.wake) == 1
    await lease.claim(1, 1, 0)
    await db.delete(broker.keys.wake)
    await lease.reap(3)
    assert await db.llen(broker.keys.wake) == 0, "nothing waits: nobody is woken"
