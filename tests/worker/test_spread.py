"""Several workers share what comes: a batch at once, beside one that takes nothing, with one that comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from support.pools.commanded import hurry
from support.pools.counted import CountedEngine, each_token_once
from support.pools.fixtures import MakeLease
from support.pools.pool import Running, eventually, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, SamplingParams, connect
from rolloutmq.messages.broker import Claim, broker_of
from rolloutmq.messages.redis import ping, shard_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis

pytestmark = pytest.mark.one_shard
SHAPES = [(32, 1), (16, 8), (128, 1), (64, 8)]
"""Jobs that come at once, and the samples of each."""
LONG = SamplingParams(max_new_tokens=2000)
TOKENS_PER_S = 20.0


def batch(jobs: int, n: int = 1, **fields: Any) -> list[GenerateJob]:
    return [job(**{"n": n, "sampling": LONG} | fields) for _ in range(jobs)]


@asynccontextmanager
async def team(url: str, broker: Broker, count: int, **config: Any) -> AsyncIterator[list[Running]]:
    """Workers that are known to take their share. What they run in the end they end at once."""
    async with AsyncExitStack() as stack:
        engines = [CountedEngine(TOKENS_PER_S) for _ in range(count)]
        workers = [await stack.enter_async_context(worker(url, engine=one, **config)) for one in engines]
        await eventually(lambda: all_take(broker, workers), what="all are idle")
        try:
            yield workers
        finally:
            for one in workers:
                hurry(one)


async def all_take(broker: Broker, workers: Sequence[Running]) -> bool:
    known = [await part.redis.hkeys(part.keys.takers) for part in broker.parts]
    return all(one.id.encode() in its for its in known for one in workers)


async def claimed(broker: Broker, workers: Sequence[Running], samples: int) -> list[int]:
    """What each worker holds once all is claimed; nothing was moved."""
    await eventually(lambda: sum(loads(workers)) == samples, what="all is claimed")
    found, load = loads(workers), await broker.load()
    assert load.attempts == load.accepted
    return found


def loads(workers: Sequence[Running]) -> list[int]:
    return [one.status.held for one in workers]


def is_even(loads: list[int], n: int) -> bool:
    """As even as jobs of so many samples allow."""
    return max(loads) <= max(1.25 * min(loads), min(loads) + n)


@pytest.mark.parametrize(("jobs", "n"), SHAPES)
async def test_a_batch_is_shared_by_all(jobs: int, n: int, redis_db: str, broker: Broker) -> None:
    async with team(redis_db, broker, 4) as workers:
        await broker.enqueue(batch(jobs, n))
        found = await claimed(broker, workers, jobs * n)
        assert is_even(found, n), found


@pytest.mark.parametrize(("jobs", "n"), SHAPES)
async def test_a_batch_over_two_shards_is_shared_by_all(
    jobs: int, n: int, redis_db: str, redis_server: EmbeddedRedis
) -> None:
    url = f"{redis_db},{redis_server.url}"
    async with connect(url, pool="default") as db:
        await ping(db)
        broker = broker_of(db, "default")
        of = batch(jobs, n)
        assert len({shard_of(one.id, 2) for one in of}) == 2
        async with team(url, broker, 4) as workers:
            await broker.enqueue(of)
            found = await claimed(broker, workers, jobs * n)
            assert is_even(found, 2 * n), found  # each shard gives whole jobs


@pytest.mark.parametrize("takes_a_token", [False, True])
async def test_what_a_frozen_worker_leaves_runs_elsewhere(
    takes_a_token: bool, redis_db: str, broker: Broker, joined: MakeLease
) -> None:
    """Its heartbeats go on, and the pool believes that it is idle."""
    frozen = await joined("frozen", lease_s=600.0)
    frozen.holds = int
    async with team(redis_db, broker, 3) as workers, connect(redis_db, pool="default", blocking=True) as its:
        assert await frozen.claim(256, 256, 0) == []
        wakes = asyncio.create_task(its.blpop([broker.keys.wake], timeout=60)) if takes_a_token else None
        await eventually(lambda: await_blocked(broker, 3 + takes_a_token), what="all wait for work")
        await broker.enqueue(batch(120))
        found = await claimed(broker, workers, 120)
        assert is_even(found, 1), found
        if wakes is not None:
            assert await wakes, "it was woken, and did nothing"


async def await_blocked(broker: Broker, count: int) -> bool:
    """Whether so many wait for a wake-up token."""
    clients = await broker.redis.client_list()
    return sum(one["cmd"] == "blpop" and "b" in one["flags"] for one in clients) >= count


async def test_a_late_worker_gets_its_part_of_what_runs(redis_db: str, broker: Broker) -> None:
    jobs = batch(160)
    async with team(redis_db, broker, 4) as workers:
        await broker.enqueue(jobs)
        await claimed(broker, workers, 160)
        await eventually(lambda: sum(one.generation.running for one in workers) == 160, what="all run")
        async with team(redis_db, broker, 1) as [late]:
            of_five = [*workers, late]
            await eventually(lambda: is_even(loads(of_five), 1) and sum(loads(of_five)) == 160, what="a fifth each")
            for one in of_five:
                hurry(one)
            found = await each_token_once(broker, jobs, *(one.engine for one in of_five))  # type: ignore[arg-type]
    by_late = [one for one in found if one.worker_id == late.id]
    assert 32 / 1.25 <= len(by_late) <= 32 * 1.25
    load = await broker.load()
    assert (load.redelivered, load.dead) == (0, 0)


async def test_a_backlog_of_one_client_does_not_hold_up_another(redis_db: str, broker: Broker) -> None:
    """The ten jobs of the other are claimed in turns with those of the first, as room comes free."""
    backlog, few = batch(1000), batch(10, reply_to="other")
    order: list[str] = []
    async with team(redis_db, broker, 1, max_running=8, prefetch=0) as [one]:
        lease = one.worker._lease
        claim = lease.claim

        async def noted(*args: Any, **more: Any) -> list[Claim]:
            claims = await claim(*args, **more)
            order.extend(it.job_id for it in claims)
            return claims

        lease.claim = noted  # type: ignore[method-assign]
        await broker.enqueue(backlog)
        await eventually(lambda: one.generation.running == 8, what="the pool is full")
        await broker.enqueue(few)
        assert len(order) == 8
        for done in range(24):
            one.engine.end(order[done], 0)  # type: ignore[attr-defined]
            await eventually(lambda done=done: len(order) == 9 + done, what="the next is claimed")
            await eventually(lambda: one.generation.running == 8, what="it runs")
        first = order[:32]
        await broker.cancel([it.id for it in backlog + few if it.id not in first[:24]])
    of_few = {it.id for it in few}
    turns = [it in of_few for it in first[8:28]]
    assert [it for it in first if it in of_few] == [it.id for it in few]
    assert all(abs(2 * sum(turns[:i]) - i) <= 1 for i in range(21)), turns
    assert sum(turns) == 10
    assert [it for it in first if it not in of_few] == [it.id for it in backlog[:22]]
