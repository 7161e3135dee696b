"""A pool whose workers differ: each gets what its engine can do, and what it cannot do keeps its place for another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import replies, status
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, Lease, LogprobOptions, SamplingParams
from rolloutmq.messages.broker import can_of, kin_of
from rolloutmq.messages.broker.needs import Waiting, needs_of
from rolloutmq.messages.model import ScoreJob
from rolloutmq.ops.status import pool_state, status_lines

Join = Callable[..., Awaitable[Lease]]
PLAIN = can_of(4096, (), True)
ABLE = can_of(4096, ("logprobs.top", "seed"), True)
LONG = can_of(32768, (), True)
POOLING = can_of(4096, ("task:embed",), False)


@pytest.fixture
def worker(broker: Broker) -> Join:
    async def join(name: str, can: str) -> Lease:
        lease = Lease(broker.redis, broker.keys.pool, name, 600.0)
        lease.can = can
        await lease.join(status(name))
        return lease

    return join


def top(**fields: Any) -> GenerateJob:
    return job(logprobs=LogprobOptions(top=5), **fields)


def long() -> GenerateJob:
    return job(sampling=SamplingParams(max_new_tokens=10_000))


async def claimed(lease: Lease, most: int = 100) -> list[str]:
    return [claim.job_id for claim in await lease.claim(most, 10_000, 0)]


def test_what_a_job_needs() -> None:
    assert needs_of(job()) == ""
    assert needs_of(job(token_ids=[1] * 2000, sampling=SamplingParams(max_new_tokens=16))) == "2016 generate"
    assert needs_of(job(seed=1, token_ids=[1, 2], sampling=SamplingParams(max_new_tokens=8))) == "10 generate seed"
    assert needs_of(job(token_ids=None, text="x", sampling=SamplingParams(max_new_tokens=5000))) == "5001 generate"
    assert needs_of(ScoreJob(token_ids=[1], continuations=([2],), reply_to="c")) == "0 task:score"


@pytest.mark.parametrize(("make", "can"), [(top, ABLE), (long, LONG)])
async def test_a_job_waits_for_a_worker_that_can_and_holds_up_nobody(
    broker: Broker, worker: Join, make: Callable[[], GenerateJob], can: str
) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", can)
    first, second, behind = make(), make(), job()
    await broker.enqueue([first, second, behind])
    assert await claimed(plain) == [behind.id]
    assert await claimed(plain) == []
    assert sum((await broker.load()).queued) == 2
    both = await able.claim(100, 100, 0)
    assert [(claim.job_id, claim.attempt) for claim in both] == [(first.id, 1), (second.id, 1)]


async def test_engines_that_generate_nothing_leave_plain_jobs_to_others(broker: Broker, worker: Join) -> None:
    pooling, plain = await worker("pooling", POOLING), await worker("plain", PLAIN)
    jobs = [job(), job()]
    await broker.enqueue(jobs)
    assert await claimed(pooling) == []
    assert await claimed(plain) == [one.id for one in jobs]


async def test_what_nobody_could_ever_do_goes_to_anybody(broker: Broker, worker: Join) -> None:
    """Who refuses it by name."""
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    one, another = job(hidden_states="all"), long()
    await broker.enqueue([one, another])
    assert await claimed(plain, 1) == [one.id]
    assert await claimed(able, 1) == [another.id]


async def test_every_name_must_be_one_workers(broker: Broker, worker: Join) -> None:
    top_only = await worker("top", can_of(4096, ("logprobs.top",), True))
    seed_only = await worker("seed", can_of(4096, ("seed",), True))
    both = await worker("both", ABLE)
    one = top(seed=3)
    await broker.enqueue([one])
    assert [await claimed(lease) for lease in (top_only, seed_only, top_only)] == [[], [], []]
    assert await claimed(both) == [one.id]


async def test_when_the_last_one_that_can_has_left_it_waits_until_its_deadline(
    broker: Broker, worker: Join, db: Redis
) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    before, after = top(deadline_s=1000.0), top()
    await broker.enqueue([before])
    assert await claimed(plain) == []
    await able.leave()
    await db.hset(broker.keys.needs, f"can:{ABLE}", await db.hget(broker.keys.clock, "at"))  # its lease is over
    await broker.enqueue([after])
    assert await claimed(plain) == []
    await db.zadd(broker.keys.deadlines, {before.id: 1})
    await db.hset(broker.keys.job(before.id), "e", 1)
    await plain.reap(3)
    (reply,) = await replies(broker)
    assert (reply.outcome.job_id, reply.outcome.outcome) == (before.id, "expired")
    assert await claimed(await worker("again", ABLE)) == [after.id]


async def test_after_an_hour_it_is_refused(broker: Broker, worker: Join, db: Redis) -> None:
    plain = await worker("plain", PLAIN)
    at = int(await db.hget(broker.keys.clock, "at"))
    await db.hset(broker.keys.needs, f"can:{ABLE}", at - 3_600_001)
    one = top()
    await broker.enqueue([one])
    assert await claimed(plain) == [one.id]
    assert await db.hkeys(broker.keys.needs) == [f"can:{PLAIN}".encode()]


async def test_cancelled_while_it_waits_it_leaves_nothing(broker: Broker, worker: Join, db: Redis) -> None:
    pooling, _ = await worker("pooling", POOLING), await worker("able", ABLE)
    jobs = [top(), job()]
    await broker.enqueue(jobs)
    assert await claimed(pooling) == []
    await broker.cancel([one.id for one in jobs], "enough")
    assert await db.zcard(broker.keys.later[1]) == 0


async def test_a_claim_looks_at_so_many_and_no_more(broker: Broker, worker: Join, db: Redis) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    jobs = [top() for _ in range(500)]
    await broker.enqueue(jobs)
    assert await claimed(plain, 10) == []
    assert await db.zcard(broker.keys.later[1]) == 10 + 64
    assert await claimed(able) == [one.id for one in jobs[:100]]


async def test_those_that_can_are_woken(broker: Broker, worker: Join, db: Redis) -> None:
    plain, _, _ = await worker("plain", PLAIN), await worker("able", ABLE), await worker("long", LONG)
    await broker.enqueue([top()])
    assert await claimed(plain) == []
    assert [await db.llen(broker.keys.token(kin_of(can))) for can in (PLAIN, ABLE, LONG)] == [0, 1, 0]


async def test_more_kinds_than_there_are_slots(broker: Broker, worker: Join, db: Redis) -> None:
    names = [f"name{number}" for number in range(300)]
    plain, able = await worker("plain", PLAIN), await worker("able", can_of(4096, names, True))
    jobs = [job() for _ in names]
    await broker.enqueue(jobs)
    for one, name in zip(jobs, names, strict=True):
        await db.hset(broker.keys.job(one.id), "N", f"10 generate {name}")
    for _ in range(10):
        assert await claimed(plain) == []
    assert await db.zcard(broker.keys.later[1]) == 256
    assert await db.zcard(broker.keys.queues[1]) == 300 - 256
    found: list[str] = []
    while more := await claimed(able):
        found += more
    assert sorted(found) == sorted(one.id for one in jobs)
    one = job()
    await broker.enqueue([one])
    await db.hset(broker.keys.job(one.id), "N", "10 generate name299")
    assert await claimed(plain) == [], "an empty slot is given to another kind"
    assert len(await db.hkeys(broker.keys.needs)) == 3


@pytest.mark.parametrize("spoilt", ["x", "1", "1e9 generate", "99999999999999999999 generate", "-1 generate"])
async def test_damaged_needs_end_their_job_alone(broker: Broker, worker: Join, db: Redis, spoilt: str) -> None:
    plain, _ = await worker("plain", PLAIN), await worker("able", ABLE)
    bad, fine = job(), job()
    await broker.enqueue([bad, fine])
    await db.hset(broker.keys.job(bad.id), "N", spoilt)
    await db.hset(broker.keys.needs, mapping={f"can:{spoilt}": 1 << 50, "slot:": 1, "slot:x": "y", "what": "1"})
    assert await claimed(plain) == [fine.id]
    (reply,) = await replies(broker)
    assert (reply.outcome.job_id, reply.outcome.ok) == (bad.id, False)


async def test_what_jobs_wait_for_is_shown(broker: Broker, worker: Join, redis_db: str, db: Redis) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    await broker.enqueue([top(), top(priority="high"), job(seed=1)])
    assert await broker.waiting() == []
    assert await claimed(plain) == []
    both, seed = ("generate", "logprobs.top"), ("generate", "seed")
    assert await broker.waiting() == [Waiting(both, 2, True, 4096), Waiting(seed, 1, True, 4096)]
    await able.leave()
    await db.hset(broker.keys.needs, f"can:{ABLE}", await db.hget(broker.keys.clock, "at"))
    assert [one.possible for one in await broker.waiting()] == [False, False]
    shown = list(status_lines(await pool_state(redis_db, "default")))
    assert "jobs that wait for generate, seed: 1 (no worker has it)" in shown


async def calls(db: Redis, lease: Lease, most: int, samples: int = 10_000) -> dict[str, int]:
    """How often a claim gave each command."""
    await db.config_resetstat()
    await lease.claim(most, samples, 0)
    return {name[8:]: one["calls"] for name, one in (await db.info("commandstats")).items()}


async def test_a_claim_looks_once_for_an_empty_slot(broker: Broker, worker: Join, db: Redis) -> None:
    names = [f"name{number}" for number in range(320)]
    plain, _ = await worker("plain", PLAIN), await worker("able", can_of(4096, names, True))
    jobs = [job() for _ in names]
    await broker.enqueue(jobs)
    for one, name in zip(jobs, names, strict=True):
        await db.hset(broker.keys.job(one.id), "N", f"10 generate {name}")
    for _ in range(5):
        await claimed(plain)
    assert await db.zcard(broker.keys.queues[1]) == 320 - 256
    assert (await calls(db, plain, 100))["zcount"] < 1000


async def test_a_full_claim_looks_at_no_further_slot(broker: Broker, worker: Join, db: Redis) -> None:
    able = await worker("able", ABLE)
    await worker("plain", PLAIN)
    await db.hset(broker.keys.needs, mapping={f"slot:generate {'seed ' * number}": number for number in range(1, 201)})
    await broker.enqueue([job(priority="high"), job(), job()])
    assert (await calls(db, able, 10, 1)).get("zrangebyscore", 0) < 300


async def test_workers_that_are_gone_are_forgotten_at_once_where_kinds_are_many(
    broker: Broker, worker: Join, db: Redis
) -> None:
    """A context that follows from free memory makes each worker a kind of its own."""
    plain, _ = await worker("plain", PLAIN), await worker("able", ABLE)
    at = int(await db.hget(broker.keys.clock, "at"))
    await db.hset(broker.keys.needs, mapping={f"can:{can_of(10_000 + n, (), True)}": at - 1 for n in range(2000)})
    assert await claimed(plain) == []
    kinds = [name for name in await db.hkeys(broker.keys.needs) if name.startswith(b"can:")]
    assert sorted(kinds) == sorted([f"can:{PLAIN}".encode(), f"can:{ABLE}".encode()])


async def test_each_kind_of_workers_is_woken_once_in_a_claim(broker: Broker, worker: Join, db: Redis) -> None:
    plain = await worker("plain", PLAIN)
    at = int(await db.hget(broker.keys.clock, "at"))
    await db.hset(broker.keys.needs, mapping={f"can:{50_000 + n} generate": at + 60_000 for n in range(100)})
    await broker.enqueue([job(sampling=SamplingParams(max_new_tokens=10_000 + number)) for number in range(100)])
    assert (await calls(db, plain, 100))["llen"] < 200
    assert await db.zcard(broker.keys.later[1]) == 100


async def test_what_waits_for_several_needs_goes_by_turns(broker: Broker, worker: Join) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    many, few = [top() for _ in range(8)], [job(seed=1) for _ in range(8)]
    await broker.enqueue([*many, *few])
    assert await claimed(plain) == []
    assert [one for _ in range(16) for one in await claimed(able, 1)] == [one.id for one in [*many, *few]]


async def test_long_contexts_do_not_starve_behind_short_ones(broker: Broker, worker: Join) -> None:
    plain, long = await worker("plain", PLAIN), await worker("long", LONG)

    def of_length(tokens: int) -> GenerateJob:
        return job(sampling=SamplingParams(max_new_tokens=tokens))

    await broker.enqueue([first := of_length(30_000)])
    assert await claimed(plain) == []
    found: list[str] = []
    for turn in range(50):  # there are always more, of 20 lengths, that came later
        await broker.enqueue([of_length(6000 + 100 * number + turn) for number in range(20)])
        assert await claimed(plain) == []
        found += await claimed(long, 1)
    assert first.id in found


async def test_a_job_is_found_again_when_the_key_of_needs_is_lost(broker: Broker, worker: Join, db: Redis) -> None:
    plain, able = await worker("plain", PLAIN), await worker("able", ABLE)
    jobs = [top(), job(seed=1), top()]
    await broker.enqueue(jobs)
    assert await claimed(plain) == []
    await plain.reap(3)
    assert await db.zcard(broker.keys.later[1]) == 3, "they wait where they are while it is there"
    await db.set(broker.keys.needs, "x")
    await able.heartbeat(status("able"))
    fourth = job(seed=1)
    await broker.enqueue([fourth])
    assert await claimed(plain) == [], "its own kind is not known at this moment"
    await plain.reap(3)
    assert set(await claimed(able)) == {one.id for one in [*jobs, fourth]}
