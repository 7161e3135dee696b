"""Work of a busy worker goes on at an idle one: with its tokens, each generated once, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ConnectionError
from support.peers.publishing import publish, publisher
from support.pools.commanded import all_done, hurry
from support.pools.counted import LONG, CountedEngine, each_token_once
from support.pools.fixtures import MakeLease
from support.pools.pool import Running, change, eventually, record, replies, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, JobFailure, RolloutResult, connect
from rolloutmq.messages.broker import Release, broker_of
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.messages.redis import ping, shard_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.control import PoolControl
from rolloutmq.worker.moving import MOST_MOVES, Plan

pytestmark = pytest.mark.one_shard


def some(count: int, **fields: Any) -> list[GenerateJob]:
    return [job(**{"sampling": LONG} | fields) for _ in range(count)]


@asynccontextmanager
async def busy(
    url: str, broker: Broker, jobs: list[GenerateJob], **config: Any
) -> AsyncIterator[tuple[Running, CountedEngine]]:
    """A worker that runs all these jobs, each sample with some tokens."""
    engine = CountedEngine()
    await broker.enqueue(jobs)
    async with worker(url, engine=engine, **config) as running:
        await eventually(lambda: len(engine.ops.generated()) == sum(one.n for one in jobs), what="all have tokens")
        yield running, engine


@asynccontextmanager
async def idle(url: str) -> AsyncIterator[tuple[Running, CountedEngine]]:
    engine = CountedEngine()
    async with worker(url, engine=engine) as running:
        yield running, engine


def held(running: Running) -> set[str]:
    return {one.id for one in running.worker._held}


async def ask(broker: Broker, giver: Running, taker: str, samples: int) -> None:
    """What the pool's script rings when a worker has found nothing."""
    plan = {"kind": "move", "moves": f"{giver.id} {taker} 0 {samples}", "level": str(samples)}
    await broker.redis.xadd(broker.keys.bell, plan)


async def test_what_runs_goes_on_at_a_late_worker_with_its_tokens(redis_db: str, broker: Broker) -> None:
    jobs = [*some(6), *some(1, n=2)]
    async with busy(redis_db, broker, jobs) as (one, first), idle(redis_db) as (two, second):
        await eventually(lambda: two.generation.running == one.generation.running == 4, what="half")
        moved = held(two)
        for job_id in moved:
            known = await record(broker, job_id)
            assert (known[b"a"], known[b"M"], known.get(b"c")) == (b"2", b"1", None)
        hurry(one)
        hurry(two)
        found = await each_token_once(broker, jobs, first, second)
    assert {(it.job_id, it.worker_id, it.attempt) for it in found} == {
        (it.id, two.id, 2) if it.id in moved else (it.id, one.id, 1) for it in jobs
    }
    assert all(len(it.legs) == (it.job_id in moved) for it in found), "it went on in a second leg"
    load = await broker.load()
    assert (load.attempts, load.redelivered, load.leases_lost, load.dead) == (7 + len(moved), 0, 0, 0)


async def test_what_waits_at_a_paused_worker_goes_to_an_idle_one(
    redis_db: str, broker: Broker, control: PoolControl
) -> None:
    jobs = some(8)
    async with busy(redis_db, broker, jobs) as (one, first):
        (await control.pause("interrupt")).check()
        async with idle(redis_db) as (two, second):
            await eventually(lambda: two.generation.running == 4, what="half")
            second.tokens_per_s = 1e9
            hurry(two)
            await eventually(lambda: len(held(one)) == 1, what="the rest but one, which is no more than its share")
            (await control.resume()).check()
            hurry(one)
            await each_token_once(broker, jobs, first, second)


@pytest.mark.parametrize("why", ["preferred", "of a session", "lost before", "moved three times"])
async def test_some_jobs_never_move(why: str, redis_db: str, broker: Broker, joined: MakeLease) -> None:
    fields: dict[str, dict[str, Any]] = {
        "preferred": {"prefer_worker": "gone", "prefer_s": 60.0},
        "of a session": {"session_id": "s"},
    }
    stay, go = some(5, **fields.get(why, {})), some(5)
    await broker.enqueue(stay)
    earlier = await joined("earlier")
    given = [Release(it.job_id, it.attempt, lost=why == "lost before") for it in await earlier.claim(8, 8, 0)]
    await earlier.release(given, 3)
    await earlier.leave()
    if why == "moved three times":
        for it in stay:
            await change(broker, it.id, {"M": 3})
    async with busy(redis_db, broker, [*stay, *go]) as (one, first), idle(redis_db) as (two, second):
        await eventually(lambda: two.generation.running == 5, what="its share")
        assert held(two) == {it.id for it in go}
        hurry(one)
        hurry(two)
        await each_token_once(broker, [*stay, *go], first, second)


async def test_a_move_to_a_worker_that_is_gone_leaves_the_job_where_it_is(redis_db: str, broker: Broker) -> None:
    jobs = some(8)
    async with busy(redis_db, broker, jobs) as (one, engine):
        await ask(broker, one, "gone", 4)
        await eventually(lambda: len(engine.begun) == 8 + 4, what="four go on after they were interrupted")
        assert held(one) == {it.id for it in jobs}
        hurry(one)
        assert {it.attempt for it in await each_token_once(broker, jobs, engine)} == {1}


async def test_a_job_whose_taker_does_not_come_runs_elsewhere(redis_db: str, broker: Broker, joined: MakeLease) -> None:
    jobs = some(8)
    await joined("frozen", lease_s=600.0)
    async with busy(redis_db, broker, jobs) as (one, engine):
        await ask(broker, one, "frozen", 4)
        await eventually(lambda: len(engine.begun) == 8 + 4, what="they are claimed again")
        hurry(one)
        found = await each_token_once(broker, jobs, engine)
    assert Counter(it.attempt for it in found) == {1: 4, 2: 4}
    assert (await broker.load()).redelivered == 0


async def test_what_cannot_be_moved_is_not_interrupted_for_ever(
    redis_db: str, broker: Broker, joined: MakeLease
) -> None:
    jobs = some(8)
    await joined("taker", lease_s=600.0)
    async with busy(redis_db, broker, jobs) as (one, engine):
        lease, moving = one.worker._lease, one.worker._moving
        assert lease is not None
        await broker.redis.hset(broker.keys.load, "saved", 1 << 40)  # no token finds room
        while chosen := moving.choose(Plan("taker", 0, 4, 4), lease):
            begun = len(engine.begun) + len(chosen)
            await ask(broker, one, "taker", 4)
            await eventually(lambda begun=begun: len(engine.begun) == begun, what="they go on")
            assert max(Counter(engine.begun).values()) <= 1 + MOST_MOVES
        assert len(engine.begun) == 8 * (1 + MOST_MOVES)
        hurry(one)
        assert {it.attempt for it in await each_token_once(broker, jobs, engine)} == {1}


@pytest.mark.parametrize("mode", ["resume", "in_place"])
async def test_new_weights_may_come_in_the_midst_of_moves(mode: UpdateMode, redis_db: str, broker: Broker) -> None:
    jobs = some(12)
    async with busy(redis_db, broker, jobs) as (one, first), publisher(redis_db, mode=mode) as source:
        updates = asyncio.create_task(publish(source, 1))
        async with idle(redis_db) as (two, second):
            assert (await updates).state == "committed"
            updates = asyncio.create_task(publish(source, 2))
            async with idle(redis_db) as (three, third):
                assert (await updates).state == "committed"
                await eventually(lambda: all(held(it) for it in (two, three)), what="all have something")
                for it in (one, two, three):
                    await eventually(lambda it=it: it.generation.version == 2)
                    hurry(it)
                found = await each_token_once(broker, jobs, first, second, third)
    for it in found:
        assert list(it.versions) == sorted(it.versions)


async def test_what_an_update_waits_for_is_not_interrupted(redis_db: str, broker: Broker) -> None:
    """With "drain" a sample has one version."""
    jobs = some(8)
    async with busy(redis_db, broker, jobs) as (one, first), publisher(redis_db, mode="drain") as source:
        update = asyncio.create_task(publish(source, 1))
        await eventually(lambda: not one.generation.gate.is_open, what="it waits for what runs")
        async with idle(redis_db) as (two, second):
            await ask(broker, one, two.id, 4)
            await broker.cancel([jobs[0].id])
            await eventually(lambda: len(held(one)) == 7, what="the bell was heard")
            hurry(one)
            found = [it.outcome for it in await wait_replies(broker, 8)]
            assert (await update).state == "committed"
    results = [it for it in found if isinstance(it, RolloutResult)]
    assert [(it.worker_id, it.versions) for it in results] == [(one.id, (0,))] * 7
    assert (first.aborted, second.begun) == ({jobs[0].id}, [])


# --- in the middle of a move ---------------------------------------------------------------------------------------


@asynccontextmanager
async def taking_out(
    redis_db: str, broker: Broker, jobs: list[GenerateJob], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Running, CountedEngine, Running, CountedEngine]]:
    """A worker that is about to give half of what it runs, and who will get it. The engine lets go of nothing yet."""
    monkeypatch.setattr("rolloutmq.worker.generation.TAKE_OUT_S", 600.0)
    async with busy(redis_db, broker, jobs) as (one, first):
        first.holds = True
        async with idle(redis_db) as (two, second):
            await eventually(lambda: len(first.aborted) == len(jobs) / 2, what="half is to go")
            yield one, first, two, second


@pytest.mark.parametrize("what", ["cancelled", "fenced"])
async def test_a_job_that_is_lost_in_the_middle_is_not_moved(
    what: str, redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, first, two, _):
        lost = min(first.aborted)
        if what == "cancelled":
            assert await broker.cancel([lost]) == ["ok"]
            await eventually(lambda: lost not in held(one), what="the ring is heard")
        else:
            await change(broker, lost, {"w": "somebody", "a": 2})
        moving, first.holds = first.aborted - {lost}, False
        await eventually(lambda: held(two) == moving, what="the others are moved")
        assert held(one) == {it.id for it in jobs} - moving - {lost}
        hurry(one)
        hurry(two)
        found = [it.outcome for it in await wait_replies(broker, 7 + (what == "cancelled"))]
        failed = [it for it in found if isinstance(it, JobFailure)]
    assert [(it.job_id, it.outcome) for it in failed] == ([(lost, "cancelled")] if what == "cancelled" else [])
    assert len({it.job_id for it in found}) == len(found)


async def test_a_job_that_is_stopped_in_the_middle_ends_with_what_it_has(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, first, two, second):
        stopped = min(first.aborted)
        assert await broker.stop([stopped]) == ["ok"]
        await eventually(lambda: next(iter(one.worker._held.get(stopped).samples.values())).ending)  # type: ignore[union-attr]
        moving, first.holds = first.aborted - {stopped}, False
        await eventually(lambda: held(two) == moving, what="the others are moved")
        hurry(one)
        hurry(two)
        found = await each_token_once(broker, jobs, first, second)
    [it] = [it for it in found if it.finish_reason == "abort"]
    assert (it.job_id, it.worker_id, it.attempt) == (stopped, one.id, 1)


async def test_a_sample_that_ends_in_the_middle_is_published_and_its_job_stays_until_then(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(4, n=2)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, first, two, second):
        lease, may_publish = one.worker._lease, asyncio.Event()
        complete = lease.complete

        async def later(finished: Any) -> list[str]:
            await may_publish.wait()
            return await complete(finished)

        monkeypatch.setattr(lease, "complete", later)
        ends = min(first.aborted)
        first.end(ends, 1)
        await eventually(lambda: one.generation.finished, what="it has ended")
        moving, first.holds = first.aborted - {ends}, False
        await eventually(lambda: held(two) >= moving, what="the other job is moved")
        assert ends in held(one)
        may_publish.set()
        hurry(one)
        hurry(two)
        found = await each_token_once(broker, jobs, first, second)
    assert [it.worker_id for it in found if (it.job_id, it.sample) == (ends, 1)] == [one.id]


async def test_a_drain_in_the_middle_gives_everything_to_the_other(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, first, two, second):
        one.worker.drain(2.0)
        first.holds = False
        await asyncio.wait_for(one.task, 30)
        hurry(two)
        await each_token_once(broker, jobs, first, second)
    assert (await broker.load()).leases_lost == 0


async def test_an_engine_that_dies_in_the_middle_takes_the_jobs_in_it_along_and_moves_none(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, first, two, second):
        first.kill()
        await eventually(lambda: first.starts == 2, what="its engine is up again")
        known = [await record(broker, it.id) for it in jobs]
        assert [(it[b"c"], b"M" in it) for it in known] == [(b"1", False)] * 8
        first.holds = False
        hurry(one)
        hurry(two)
        await each_token_once(broker, jobs, first, second)


async def test_a_giver_that_dies_in_the_middle_loses_nothing(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with taking_out(redis_db, broker, jobs, monkeypatch) as (one, _, two, second):
        await one.die()
        second.tokens_per_s = 1e9
        await all_done(broker, jobs)
        assert {it.outcome.worker_id for it in await replies(broker)} == {two.id}  # type: ignore[union-attr]


async def test_a_move_whose_answer_is_lost_is_one_all_the_same(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = some(8)
    async with busy(redis_db, broker, jobs) as (one, _):
        lease = one.worker._lease
        release, given = lease.release, list[str]()

        async def unheard(releases: Any, max_lost: int, to: str = "") -> list[str]:
            states = await release(releases, max_lost, to)
            if to and not given:
                given.extend(it.job_id for it in releases)
                raise ConnectionError("the answer is lost")
            return states

        monkeypatch.setattr(lease, "release", unheard)
        async with idle(redis_db) as (two, _):
            await eventually(lambda: len(given) == 4 and held(two) >= set(given), what="half")
            await eventually(lambda: not held(one) & held(two), what="the giver learns of it")
            hurry(one)
            hurry(two)
            await all_done(broker, jobs)
            by = {it.outcome.job_id: it.outcome.worker_id for it in await replies(broker)}  # type: ignore[union-attr]
    assert {by[it] for it in given} == {two.id}
    load = await broker.load()
    assert (load.redelivered, load.dead) == (0, 0)


async def test_each_shard_evens_out_its_own(redis_db: str, redis_server: EmbeddedRedis) -> None:
    url = f"{redis_db},{redis_server.url}"
    pile = some(60)
    jobs = [it for shard in (0, 1) for it in [one for one in pile if shard_of(one.id, 2) == shard][:8]]
    async with connect(url, pool="default") as db:
        await ping(db)
        broker = broker_of(db, "default")
        async with busy(url, broker, jobs) as (one, first), idle(url) as (two, second):
            await eventually(lambda: Counter(shard_of(it, 2) for it in held(two)) == {0: 4, 1: 4}, what="half of each")
            await eventually(lambda: two.generation.running == one.generation.running == 8)
            hurry(one)
            hurry(two)
            found = await each_token_once(broker, jobs, first, second)
    assert Counter(it.attempt for it in found) == {1: 8, 2: 8}
