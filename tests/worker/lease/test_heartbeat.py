"""Who looks for dead workers and for jobs that nobody was woken for, alone and in a crowd."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import status
from support.specimens.messages import job

from rolloutmq.messages import Broker, LeaseLost, Release
from rolloutmq.messages.broker import Beat
from rolloutmq.worker.lease import Membership


async def test_of_a_crowd_a_few_reap(broker: Broker, joined: Any) -> None:
    async def clock() -> int:
        return int(await broker.redis.hget(broker.keys.clock, "at"))

    crowd = [await joined(f"w{number}") for number in range(50)]
    began = await clock()
    reaped = [(await lease.heartbeat(status(lease.worker_id))).reaps for lease in crowd]
    assert sum(reaped) <= 1 + (await clock() - began) // 200  # of the milliseconds that have passed one in 200


@pytest.mark.parametrize(
    ("workers", "lease_s", "between"),
    [
        (1, 10.0, (1.0, 1.0)),
        (300, 10.0, (1.0, 1.0)),
        (600, 10.0, (1.0, 2.0)),
        (5000, 10.0, (1.0, 2.0)),
        (5000, 2.0, (0.25, 0.5)),
    ],
)
async def test_workers_of_a_crowd_beat_less_often(
    joined: Any, workers: int, lease_s: float, between: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = await joined(lease_s=lease_s)
    beats = Membership(lease, min(1.0, lease_s / 10), 3)

    async def crowd(_: Any) -> Beat:
        return Beat(0, 0, 0, reaps=False, workers=workers)

    async def enough(_: Beat) -> None:
        raise LeaseLost

    monkeypatch.setattr(lease, "heartbeat", crowd)
    await beats.join(status(lease.worker_id))
    with pytest.raises(LeaseLost):
        await beats.run(lambda: status(lease.worker_id), enough)
    seen = [beats._pause_s() for _ in range(200)]
    assert between[0] <= min(seen) <= max(seen) <= between[1]
    assert max(seen) - min(seen) >= 0.8 * (between[1] - between[0])


async def test_a_heartbeat_says_how_many_workers_there_are(joined: Any) -> None:
    for number in range(3):
        lease = await joined(f"w{number}")
    assert (await lease.heartbeat(status("w2"))).workers == 3


@pytest.mark.parametrize("open_transfer", [None, "0", "7"])
async def test_who_comes_and_goes_rings_for_nobody(
    db: Redis, broker: Broker, joined: Any, open_transfer: str | None
) -> None:
    """Each ring wakes every worker: of a thousand that join at once each would be woken a thousand times."""
    if open_transfer is not None:
        await db.hset(broker.keys.weights, "open", open_transfer)
    before = await broker.roster()
    await (await joined("w1")).leave()
    assert await broker.roster() == before + 2
    assert await db.xrange(broker.keys.bell) == []


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
