"""Leases and deadlines follow the pool's clock: whatever becomes of Redis' own, and whoever comes to witness it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import replies, status
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease, Release
from rolloutmq.messages.broker import Witness, living_workers
from rolloutmq.messages.scripts import runner, script_source

LEASE_S = 10
STEPS = [3600, -3600, 600, -600, 5, -5]  # an hour's step; a replica that is ten minutes off; a correction
BEGAN_S = 1_900_000_000
# Redis' clock as the scripts see it: it only moves as a test says, however slow the machine is. Redis' TTLs go on.
STEPPED = f"""(function()
  local ms = {BEGAN_S} * 1000 + (tonumber(redis.call('GET', 'stepped')) or 0)
  return {{math.floor(ms / 1000), ms % 1000 * 1000}}
end)()"""


@dataclass
class Clocks:
    """Time as a test makes it pass: for everybody, or for Redis' clock only."""

    db: Redis
    passed: float = 0.0

    async def go_on(self, seconds: float) -> None:
        self.passed += seconds
        await self.step(seconds)

    async def step(self, seconds: float) -> None:
        await self.db.incrby("stepped", round(seconds * 1000))


@pytest.fixture
def clocks(db: Redis, monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks(db)
    monkeypatch.setattr(Witness, "now", staticmethod(lambda: 1000.0 + made.passed))
    stepped = lambda *name: script_source(*name).replace("redis.call('TIME')", STEPPED)  # noqa: E731
    monkeypatch.setattr(runner, "script_source", stepped)
    return made


async def beat(*leases: Lease) -> tuple[int, ...]:
    """Everybody's heartbeat, with all that it takes back. Returns totals as `reap` does."""
    totals = (0, 0, 0, 0)
    for lease in leases:
        await lease.heartbeat(status(lease.worker_id))
        totals = tuple(map(sum, zip(totals, await lease.reap(3), strict=True)))
    return totals


async def seconds_until(clocks: Clocks, which: int, *leases: Lease, most: int = 2000, every: int = 1) -> int:
    """For how long everybody beats until something of that place in `reap`'s answer happens."""
    for second in range(every, most, every):
        await clocks.go_on(every)
        if (await beat(*leases))[which]:
            return second
    raise AssertionError(f"not within {most} s")


@pytest.mark.parametrize("step", STEPS)
async def test_a_dead_workers_jobs_come_back_in_time_and_nobody_else_is_touched(
    broker: Broker, db: Redis, joined: Any, clocks: Clocks, step: int
) -> None:
    await broker.enqueue([job() for _ in range(3)])
    dead, *living = [await joined(name, LEASE_S) for name in ("dead", "w1", "w2")]
    for lease in (dead, *living):
        assert len(await lease.claim(1, 1, 0)) == 1
    await beat(*living)
    await clocks.step(step)
    assert await seconds_until(clocks, 0, *living) in range(LEASE_S, LEASE_S + 3)
    assert (await beat(*living), await db.zcard(broker.keys.workers)) == ((0, 0, 0, 0), 2)
    assert [await lease.held() for lease in living] != [frozenset(), frozenset()]


@pytest.mark.parametrize("step", STEPS[:4])
@pytest.mark.parametrize("newcomer_first", [False, True])
async def test_a_deadline_passes_when_it_has_passed(
    broker: Broker, joined: Any, clocks: Clocks, step: int, newcomer_first: bool
) -> None:
    await broker.enqueue([job(deadline_s=600.0)])
    workers = [await joined("w1", LEASE_S), await joined("w2", LEASE_S)]
    await beat(*workers)
    await clocks.step(step)
    if newcomer_first:  # it has witnessed nothing of what was before, and speaks first
        workers.insert(0, await joined("new", LEASE_S))
        await beat(workers[0])
    assert await seconds_until(clocks, 2, *workers, every=5) in range(600, 608)
    (reply,) = await replies(broker)
    assert reply.outcome.outcome == "expired"


@pytest.mark.parametrize("step", STEPS)
async def test_a_pool_without_workers_is_watched_by_its_clients(broker: Broker, clocks: Clocks, step: int) -> None:
    await broker.enqueue([job(deadline_s=600.0)])
    assert await broker.end_overdue() == 0
    await clocks.step(step)
    for _ in range(119):
        await clocks.go_on(5)
        assert await broker.end_overdue() == 0
    # What passed between the last look and a step back is not seen by anybody: 5 s here, and never too early.
    ended = 0
    for _ in range(2):
        await clocks.go_on(5)
        ended += await broker.end_overdue()
    assert ended == 1


@pytest.mark.parametrize("how", ["left", "died", "nobody was ever there"])
async def test_who_comes_after_a_day_believes_redis(broker: Broker, joined: Any, clocks: Clocks, how: str) -> None:
    await broker.enqueue([job(), job(deadline_s=600.0)])
    if how != "nobody was ever there":
        first = await joined("first", LEASE_S)
        (claim,) = await first.claim(1, 1, 0)
        if how == "left":
            await first.release([Release(claim.job_id, 1)], 3)
            await first.leave()
    await broker.end_overdue()
    await clocks.go_on(86400)
    heir = await joined("heir", LEASE_S)
    taken = await heir.reap(3)
    wait = 0 if taken[2] else await seconds_until(clocks, 2, heir)
    assert wait <= LEASE_S + 2
    if how == "died":
        assert len(await heir.claim(9, 9, 0)) == 1


async def test_a_restarted_worker_takes_back_its_jobs_after_a_lease(
    broker: Broker, joined: Any, clocks: Clocks
) -> None:
    await broker.enqueue([job()])
    killed = await joined("killed", LEASE_S)
    assert len(await killed.claim(1, 1, 0)) == 1
    await clocks.go_on(3)
    await clocks.step(3600)
    assert await seconds_until(clocks, 0, await joined("restarted", LEASE_S)) <= LEASE_S + 2


@pytest.mark.parametrize("witnessed", [0.0, 0.5, 10.0], ids=["stands", "slow", "fast"])
@pytest.mark.parametrize("step", [0, 3600, -3600])
async def test_a_broken_witness_neither_holds_up_nor_drives_the_clock(
    broker: Broker, joined: Any, clocks: Clocks, witnessed: float, step: int
) -> None:
    broken, good = await joined("broken", LEASE_S), await joined("good", LEASE_S)
    says = broken._witness.says
    broken._witness.says = lambda: (says()[0], round(says()[1] * witnessed))
    await beat(broken, good)
    began = int(await broker.redis.hget(broker.keys.clock, "at"))
    for second in range(120):
        await clocks.go_on(0.5)
        await beat(broken)
        await clocks.go_on(0.5)
        await beat(good)
        if second == 10 and not (witnessed > 1 and step > 0):  # both at once: the fast one is believed for a step
            await clocks.step(step)
    passed = (int(await broker.redis.hget(broker.keys.clock, "at")) - began) / 1000
    assert 117 <= passed <= 121


async def test_the_turn_of_a_dead_ward_ends_however_redis_clock_is_set(
    broker: Broker, db: Redis, joined: Any, clocks: Clocks
) -> None:
    await broker.enqueue([job() for _ in range(2)])
    ward, other = await joined("ward", LEASE_S), await joined("other", LEASE_S)
    for attempt in (1, 2):
        claims = await ward.claim(9, 9, 0)
        await ward.release([Release(it.job_id, attempt, lost=True) for it in claims], 4 if attempt < 2 else 3)
    assert len(await ward.claim(9, 9, 0)) == 1
    assert await other.claim(9, 9, 0) == []
    await clocks.step(-3600)
    assert await seconds_until(clocks, 1, other) <= LEASE_S + 2
    assert len(await other.claim(9, 9, 0)) == 1


async def test_who_lives_is_told_by_the_pools_clock(broker: Broker, db: Redis, joined: Any, clocks: Clocks) -> None:
    await joined("w1", LEASE_S)
    for step in (3600, -7200):
        await clocks.step(step)
        assert await living_workers(db, broker.keys) == {"w1"}


@pytest.mark.parametrize(
    "content", [{"at": "x"}, {"at": "9" * 40}, {"seen": ""}, {"slept": "-1"}, {"gap": "x", "until": "y"}, {}]
)
async def test_a_damaged_clock_goes_on(
    broker: Broker, db: Redis, joined: Any, clocks: Clocks, content: dict[str, str]
) -> None:
    await broker.enqueue([job(), job(deadline_s=600.0)])
    dead, living = await joined("dead", LEASE_S), await joined("living", LEASE_S)
    await dead.claim(1, 1, 0)
    await db.hset(broker.keys.clock, mapping=content) if content else await db.delete(broker.keys.clock)
    assert await seconds_until(clocks, 0, living) <= LEASE_S + 2
    assert await seconds_until(clocks, 2, living, every=5) in range(570, 610)
