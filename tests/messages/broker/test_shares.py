"""A claim fills a worker up to its share of what waits; what somebody leaves goes to others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, Finished, Lease, Release

pytestmark = pytest.mark.one_shard
ROOM = 256


class Taking:
    """A worker that has room for 256 samples, and takes its shares."""

    def __init__(self, lease: Lease, pace: float = 0.0, engine: str = "") -> None:
        self.lease, self.held, self.claims = lease, Counter[str](), 0
        lease.holds, lease.pace, lease.engine = self.held.total, (lambda: pace), engine

    async def claim(self, room: int | None = None, version: int = 0, **adapters: int) -> int:
        """Samples that one claim gives."""
        given = await self.lease.claim(64, ROOM - self.held.total() if room is None else room, version, adapters)
        self.held.update({one.job_id: one.n for one in given})
        self.claims += 1
        return sum(one.n for one in given)

    async def work(self, **claim: Any) -> None:
        """Claim until it has its share."""
        while await self.claim(**claim):
            pass


async def team(joined: MakeLease, count: int, **fields: Any) -> list[Taking]:
    """Workers that have looked for work once, and are idle."""
    workers = [Taking(await joined(f"w{i}"), **fields) for i in range(count)]
    for one in workers:
        assert await one.claim() == 0
    return workers


async def submit(broker: Broker, count: int, **fields: Any) -> None:
    await broker.enqueue([job(**fields) for _ in range(count)])


def even(workers: list[Taking]) -> bool:
    loads = [one.held.total() for one in workers]
    return max(loads) <= 1.25 * min(loads)


async def lapse(broker: Broker, workers: list[Taking]) -> None:
    """Have them wait for the others, twice as long as they are told to."""
    again_ms = round(1000 * max(one.lease.again_s for one in workers))
    await broker.redis.hincrby(broker.keys.clock, "at", again_ms)
    assert [await one.claim() for one in workers] == [0] * len(workers)
    await broker.redis.hincrby(broker.keys.clock, "at", again_ms)


async def waiting(broker: Broker) -> int:
    return sum((await broker.load()).queued)


@pytest.mark.parametrize(("jobs", "n"), [(32, 1), (16, 8), (128, 1), (64, 8)])
async def test_four_idle_workers_get_a_quarter_each(broker: Broker, joined: MakeLease, jobs: int, n: int) -> None:
    workers = await team(joined, 4)
    await submit(broker, jobs, n=n)
    for one in workers:
        await one.work()
    assert [one.held.total() for one in workers] == [jobs * n / 4] * 4


async def test_what_workers_hold_counts(broker: Broker, joined: MakeLease) -> None:
    workers = await team(joined, 4)
    await submit(broker, 64)
    workers[0].held["busy"] = 64
    for one in workers:
        await one.work()
    assert workers[0].held.total() == 64
    assert even(workers[1:])


async def test_who_has_no_room_leaves_its_share_to_the_others(broker: Broker, joined: MakeLease) -> None:
    one, other, paused = await team(joined, 3)
    await paused.claim(room=0)
    await submit(broker, 60)
    await one.work()
    await other.work()
    assert [one.held.total(), other.held.total()] == [30, 30]


@pytest.mark.parametrize(
    ("paces", "engines", "shares"),
    [
        ((100.0, 400.0), ("a", "b"), [20, 80]),
        ((100.0, 140.0), ("a", "b"), [50, 50]),  # nearly as fast
        ((100.0, 400.0), ("a", "a"), [50, 50]),  # of one kind: one of them had less to do when it was measured
        ((0.0, 400.0), ("a", "b"), [50, 50]),  # not known yet
    ],
)
async def test_a_faster_kind_of_engine_gets_more(
    broker: Broker, joined: MakeLease, paces: tuple[float, ...], engines: tuple[str, ...], shares: list[int]
) -> None:
    workers = [Taking(await joined(f"w{i}"), *it) for i, it in enumerate(zip(paces, engines, strict=True))]
    for one in workers:
        assert await one.claim() == 0
    await submit(broker, 100)
    for one in workers:
        await one.work()
    assert [one.held.total() for one in workers] == shares


@pytest.mark.parametrize("n", [8, 64])
async def test_a_large_job_is_taken_whole_by_one(broker: Broker, joined: MakeLease, n: int) -> None:
    workers = await team(joined, 4)
    await submit(broker, 2, n=n)
    for one in workers:
        await one.work()
    assert sorted(one.held.total() for one in workers) == [0, 0, n, n]


async def test_only_workers_that_can_run_it_have_a_share_of_what_waits_aside(broker: Broker, joined: MakeLease) -> None:
    workers = [Taking(await joined(f"w{i}")) for i in range(4)]
    for one, has in zip(workers, [{}, {}, {"a": 1}, {"a": 1}], strict=True):
        assert await one.claim(**has) == 0
    await broker.redis.hset(broker.keys.weights, "number:a", "1")
    await submit(broker, 40, lora="a")
    await workers[0].claim()
    assert await broker.redis.zcard(broker.keys.later[1]) == await waiting(broker) == 40
    await workers[2].work(a=1)
    await workers[3].work(a=1)
    assert [one.held.total() for one in workers] == [0, 0, 20, 20]


async def test_a_share_that_nobody_takes_lapses(broker: Broker, joined: MakeLease) -> None:
    """Two workers have said that they take work, and do not: they are frozen, but their leases are not over."""
    one, other, *_ = await team(joined, 4)
    awake = [one, other]
    await submit(broker, 64)
    for one in awake:
        await one.work()
    assert [one.held.total() for one in awake] == [16, 16]
    assert [one.lease.has_share for one in awake] == [True, True]
    await lapse(broker, awake)
    for _ in range(2):
        for one in awake:
            await one.work()
        assert even(awake), [one.held.total() for one in awake]
        assert await waiting(broker) == 0, "they are not waited for once more"
        await submit(broker, 32)


async def test_what_only_one_can_take_does_not_wait_for_the_others(broker: Broker, joined: MakeLease) -> None:
    """Those who claim all the time get nothing, because their weights are too old; so the share of the others grows."""
    old, new = await team(joined, 2)
    await submit(broker, 64, min_version=1)

    async def all_is_taken() -> bool:
        await old.claim()
        await new.work(version=1)
        return await waiting(broker) == 0

    await eventually(all_is_taken)
    assert (old.held.total(), new.held.total()) == (0, 64)


async def test_a_counter_that_somebody_has_broken_stops_nobody(broker: Broker, joined: MakeLease, db: Redis) -> None:
    workers = await team(joined, 2)
    await submit(broker, 64)
    await db.hset(broker.keys.load, mapping={"queued": "0", "offered": "x", "spread": "\xff", "planned": "y"})

    async def all_is_taken() -> bool:
        for one in workers:
            await one.work()
        return await waiting(broker) == 0

    await eventually(all_is_taken)
    assert sum(one.held.total() for one in workers) == 64


@pytest.mark.parametrize(("jobs", "tokens"), [(1, 1), (3, 3), (64, 4)])
async def test_a_batch_wakes_as_many_as_it_needs(broker: Broker, joined: MakeLease, jobs: int, tokens: int) -> None:
    await team(joined, 4)
    await submit(broker, jobs)
    assert await broker.redis.llen(broker.keys.wake) == tokens


async def test_who_holds_less_has_others_told_to_give_it_some(broker: Broker, joined: MakeLease) -> None:
    full, idle = await team(joined, 2)
    await submit(broker, 64)
    await full.work()
    await lapse(broker, [full])
    await full.work()
    assert await waiting(broker) == 0

    async def ring() -> Any:
        assert await idle.claim() == 0
        assert idle.lease.again_s > 0
        return await broker.redis.xrevrange(broker.keys.bell, count=1)

    [(_, said)] = await eventually(ring)
    assert said == {b"kind": b"move", b"moves": b"w0 w1 0 32", b"level": b"32"}


@pytest.mark.parametrize("why", ["nobody has that name", "its lease is over", "the job was lost before"])
async def test_a_job_that_cannot_move_is_kept(why: str, broker: Broker, joined: MakeLease, expire_lease: Any) -> None:
    giver, taker = await joined("w1"), await joined("w2")
    await submit(broker, 1)
    if why == "the job was lost before":
        [one] = await taker.claim(1, 1, 0)
        await taker.release([Release(one.job_id, one.attempt, lost=True)], 3)
    [one] = await giver.claim(1, 1, 0)
    if why == "its lease is over":
        await expire_lease(taker)
    to = "nobody" if why == "nobody has that name" else "w2"
    assert await giver.release([Release(one.job_id, one.attempt)], 3, to=to) == ["kept"]
    done = Finished(one.job_id, one.attempt, 0, result(job(id=one.job_id), attempt=one.attempt))
    assert await giver.complete([done]) == ["ok"]
