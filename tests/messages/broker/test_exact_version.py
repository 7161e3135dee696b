"""Jobs that want exactly one version of the weights, in a pool whose workers have several."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.pools.pool import eventually, record, status
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, InvalidField, Lease
from rolloutmq.messages.broker import can_of
from rolloutmq.messages.broker.needs import read_waiting
from rolloutmq.messages.model import RewardJob
from rolloutmq.messages.redis import ADAPTERS_FROM
from rolloutmq.producer.training.staleness import Staleness

pytestmark = pytest.mark.one_shard
Join = Callable[..., Awaitable[Lease]]
KNOWS = can_of(4096, ("exact_version",), True)
OLDER = can_of(4096, (), True)
SEED = can_of(4096, ("exact_version", "seed"), True)


@pytest.fixture
def worker(broker: Broker) -> Join:
    async def join(name: str, can: str = KNOWS) -> Lease:
        lease = Lease(broker.redis, broker.keys.pool, name, 600.0)
        lease.can, lease.holds = can, lambda: 0
        await lease.join(status(name))
        return lease

    return join


def exact(version: int, **fields: Any) -> GenerateJob:
    return job(exact_version=version, **fields)


async def claimed(lease: Lease, version: int, **adapters: int) -> list[str]:
    """All that it gets, more than its share."""
    found = list[str]()
    while True:
        found += (more := [claim.job_id for claim in await lease.claim(100, 100, version, adapters)])
        if not more and not lease.has_share:
            return found


async def told(broker: Broker, lease: Lease) -> bool:
    """Whether this worker has a wake-up token of its own."""
    return await broker.redis.llen(broker.keys.token(lease.worker_id)) > 0


async def test_only_a_worker_with_that_version_gets_it_and_is_woken(broker: Broker, worker: Join) -> None:
    one, other, newer = await worker("one"), await worker("other"), await worker("newer")
    assert [await claimed(one, 7), await claimed(other, 7), await claimed(newer, 8)] == [[], [], []]
    old, plain, new = exact(7), job(), exact(8)
    await broker.enqueue([old, plain, new])
    assert sorted(await claimed(newer, 8)) == sorted([plain.id, new.id])
    assert (await told(broker, one), await told(broker, other), await told(broker, newer)) == (True, True, False)
    assert await claimed(other, 7) == [old.id]
    assert await claimed(one, 7) == []


@pytest.mark.parametrize("version", [0, 6, 8, ADAPTERS_FROM - 1])
async def test_neither_an_older_nor_a_newer_worker_gets_it(broker: Broker, worker: Join, version: int) -> None:
    await broker.enqueue([one := exact(7)])
    lease = await worker("w")
    assert await claimed(lease, version) == []
    assert await claimed(lease, 7) == [one.id], "the worker has come to that version"


async def test_versions_0_and_the_largest_are_versions_like_others(broker: Broker, worker: Join) -> None:
    first, last, lease = exact(0), exact(ADAPTERS_FROM - 1), await worker("w")
    await broker.enqueue([first, last])
    assert await claimed(lease, 5) == []
    assert await claimed(lease, 0) == [first.id]
    assert await claimed(lease, ADAPTERS_FROM - 1) == [last.id]


async def test_turns_and_classes_hold_among_those_put_aside(broker: Broker, worker: Join) -> None:
    newer, lease = await worker("newer"), await worker("w")
    low, first, second, high = exact(7, priority="low"), exact(7), exact(7), exact(7, priority="high")
    await broker.enqueue([low, first, second, high])
    assert await claimed(newer, 8) == []
    assert await claimed(lease, 7) == [high.id, first.id, second.id, low.id]


async def test_a_worker_that_does_not_know_the_field_leaves_it_to_those_that_do(broker: Broker, worker: Join) -> None:
    """An older release decodes the job without the field, and would run it on any weights."""
    older, lease = await worker("older", OLDER), await worker("w")
    await broker.enqueue([one := exact(7)])
    assert await claimed(older, 7) == []
    assert await claimed(lease, 7) == [one.id]


async def test_workers_that_lack_something_else_do_not_wake_each_other_for_ever(broker: Broker, worker: Join) -> None:
    right, able = await worker("right"), await worker("able", SEED)
    assert [await claimed(right, 7), await claimed(able, 8)] == [[], []]
    await broker.enqueue([one := exact(7, seed=1)])
    for _ in range(3):
        assert [await claimed(able, 8), await claimed(right, 7)] == [[], []]
        assert not await told(broker, right), "it cannot run the job either"
        await right.reap(3)
        (waiting,) = await read_waiting(broker.redis, broker.keys)
        assert waiting.names == ("exact_version", "generate", "seed", "version=7"), "nobody else looks there"
    both = await worker("both", SEED)
    assert await claimed(both, 7) == [one.id]


async def test_with_an_adapter_both_must_be_there(broker: Broker, worker: Join) -> None:
    await broker.redis.hset(broker.keys.weights, mapping={"adapter:math": 2, "number:math": 1, "adapters": 1})
    bare, newer, lease = await worker("bare"), await worker("newer"), await worker("w")
    await broker.enqueue([one := exact(7, lora="math")])
    for _ in range(3):
        assert [await claimed(bare, 7), await claimed(newer, 8, math=2)] == [[], []]
    assert not await told(broker, bare)
    assert await claimed(lease, 7, math=2) == [one.id]


async def test_a_preferred_worker_goes_first_if_it_has_the_version(broker: Broker, worker: Join) -> None:
    liked, other, newer = await worker("liked"), await worker("other"), await worker("newer")
    one = exact(7, prefer_worker="liked", prefer_s=60.0)
    await broker.enqueue([one])
    assert [await claimed(newer, 8), await claimed(other, 7)] == [[], []]
    assert await claimed(liked, 7) == [one.id]
    two = exact(7, prefer_worker="liked", prefer_s=60.0)
    await broker.enqueue([two])
    assert await claimed(liked, 8) == [], "it has gone on: the job is anybody's who has the version"
    assert await claimed(other, 7) == [two.id]


async def test_its_record_says_so_and_it_ends_like_any_other(broker: Broker, worker: Join) -> None:
    lease = await worker("w")
    cancelled, late = exact(7), exact(7, deadline_s=0.001)
    await broker.enqueue([cancelled, late])
    assert await claimed(lease, 8) == []
    assert (await record(broker, cancelled.id))[b"v"] == b"=7"
    assert await broker.cancel([cancelled.id], "test") == ["ok"]

    async def over() -> bool:
        await lease.heartbeat(status("w"))
        return (await lease.reap(3))[2] > 0 or (await broker.load()).expired > 0

    await eventually(over)
    load = await broker.load()
    assert (load.cancelled, load.expired, load.open_jobs, sum(load.queued)) == (1, 1, 0, 0)


async def test_damage_ends_the_job_and_nothing_else(broker: Broker, worker: Join) -> None:
    lease, bad, good = await worker("w"), exact(7), exact(7)
    await broker.enqueue([bad, good])
    await broker.redis.hset(broker.keys.job(bad.id), "v", "=seven")
    assert await claimed(lease, 7) == [good.id]
    assert (await broker.load()).dead == 1


async def test_each_job_runs_on_its_version_and_none_is_left(broker: Broker, worker: Join) -> None:
    """Workers of several versions claim in any order, take versions, and are lost."""
    rng = random.Random(5)
    leases = [await worker(f"w{number}") for number in range(4)]
    at = {lease.worker_id: number % 3 for number, lease in enumerate(leases)}
    jobs = {one.id: one for one in (exact(rng.randrange(3)) if rng.random() < 0.7 else job() for _ in range(200))}
    await broker.enqueue(list(jobs.values()))
    ran: dict[str, int] = {}
    for _ in range(400):
        lease = rng.choice(leases)
        if rng.random() < 0.2:
            at[lease.worker_id] = rng.randrange(3)
        for claim in await lease.claim(rng.randrange(1, 9), 8, at[lease.worker_id]):
            ran[claim.job_id] = at[lease.worker_id]
        if rng.random() < 0.05:
            await broker.redis.zadd(broker.keys.workers, {lease.worker_id: 1}, xx=True)
            await next(one for one in leases if one is not lease).reap(9)
            leases[leases.index(lease)] = await worker(lost := f"{lease.worker_id}-")
            at[lost] = at.pop(lease.worker_id)
    assert ran.keys() == jobs.keys()
    assert {one.exact_version for one in jobs.values()} == {None, 0, 1, 2}
    for name, version in ran.items():
        assert jobs[name].exact_version in (None, version)


@pytest.mark.parametrize("kind", [job, lambda **fields: RewardJob.build(token_ids=([1],), **fields)])
@pytest.mark.parametrize(
    "fields",
    [
        {"exact_version": -1},
        {"exact_version": 1 << 40},
        {"exact_version": 3, "min_version": 4},
        {"exact_version": 3, "max_staleness": 1},
    ],
)
def test_contradictions_are_refused_by_name(kind: Callable[..., Any], fields: dict[str, int]) -> None:
    with pytest.raises((InvalidField, ValueError), match="exact_version"):
        kind(**fields)
    assert kind(exact_version=3, min_version=3).features_used()[-1] == "exact_version"


def test_a_feed_refuses_it_by_name() -> None:
    with pytest.raises(InvalidField, match="exact_version"):
        Staleness(1, 8).check(exact(7))
