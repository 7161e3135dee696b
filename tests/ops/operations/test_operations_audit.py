"""The audit: clean on a pool that works hard, and finding each kind of damage done by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, eventually, status, worker
from support.specimens.messages import job, result
from support.specimens.turns import turn

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Finished, GenerateJob, Lease, Release, connect, new_id
from rolloutmq.messages.broker import Piece, RecordedSessions
from rolloutmq.messages.model import Partial
from rolloutmq.messages.redis.keys import later_member
from rolloutmq.ops.operations.audit.look import Looker
from rolloutmq.ops.operations.audit.sweep import Sweep
from rolloutmq.worker.scripted.engine import ScriptedEngine

Damage = Callable[["Pool"], Awaitable[Any]]


async def audit(db: Redis, pause_s: float = 0.02, most: int = 1000) -> dict[str, Any]:
    return await Sweep(db, "default", lambda *_: None, pause_s, most).run()


def kinds(report: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["kind"], one["key"]) for one in report["violations"]}


class Pool:
    """One of everything: queued jobs of two classes, one waiting for newer weights, a suspect, a running one of worker
    w1, ended ones with their results unread; recorded sessions."""

    def __init__(self, db: Redis) -> None:
        self.db, self.broker = db, Broker(db, "default")
        self.keys = self.broker.keys
        self.queued, self.low, self.waiting = job(deadline_s=600.0), job(priority="low"), job(min_version=9)
        self.suspect, self.running, self.done = job(), job(deadline_s=600.0), job()

    async def fill(self) -> Pool:
        lease, other = Lease(self.db, "default", "w1"), Lease(self.db, "default", "w2")
        for one in (lease, other):
            await one.join(status(one.worker_id))
        await self.broker.enqueue([self.suspect])
        (claim,) = await other.claim(1, 9, 0)
        await other.release([Release(claim.job_id, 1, lost=True)], 2)
        await other.leave()
        await self.db.set(self.keys.ward, f"{10**14}@nobody", px=600_000)
        await self.broker.enqueue([self.done, self.running])
        await lease.claim(2, 9, 0)
        kept = Partial(token_ids=[1, 2], logprobs=[-1.0, -1.0], segments=((0, 2),))
        assert await lease.checkpoint([Piece(self.running.id, 1, 0, 0, kept)]) == ["ok"]
        await lease.complete([Finished(self.done.id, 1, 0, result(self.done))])
        await self.broker.enqueue([self.waiting])
        assert await lease.claim(1, 9, 0) == []
        cancelled = job()
        await self.broker.enqueue([self.queued, self.low, cancelled])
        await self.broker.cancel([cancelled.id])
        sessions = RecordedSessions(self.broker)
        for name in ("open", "taken", "forgotten"):
            await sessions.record("default", name, "k", turn([1], [2]))
        await sessions.take("default", "taken")
        await sessions.forget("default", "forgotten")
        return self


@pytest.fixture
async def pool(redis_db: str) -> AsyncIterator[Pool]:
    async with connect(redis_db) as db:
        yield await Pool(db).fill()


async def test_a_whole_pool_has_nothing_wrong_and_is_left_as_it_was(pool: Pool) -> None:
    before = await dump(pool.db, skip=())
    report = await audit(pool.db)
    assert report["violations"] == []
    assert report["not_judged"] == []
    assert report["checked"]["jobs"] == 7
    assert report["checked"]["entries"] == 1 + 2 + 1 + 5 + 2  # held, queued, later, client, deadlines
    assert await dump(pool.db, skip=()) == before


async def test_an_empty_pool(redis_db: str) -> None:
    async with connect(redis_db) as db:
        assert (await audit(db))["violations"] == []


def _job(name: str) -> Callable[[Pool], str]:
    return lambda pool: f"job:{getattr(pool, name).id}"


DAMAGE: dict[str, tuple[Damage, str | Callable[[Pool], str]]] = {
    "not_queued": (lambda p: p.db.zrem(p.keys.queues[1], p.queued.id), _job("queued")),
    "not_queued ": (lambda p: p.db.delete(p.keys.later[1]), _job("waiting")),
    "not_queued  ": (lambda p: p.db.delete(p.keys.suspects), _job("suspect")),
    "queued_twice": (lambda p: p.db.zadd(p.keys.queues[0], {p.queued.id: 1}), _job("queued")),
    "queued_twice ": (lambda p: p.db.rpush(p.keys.suspects, p.low.id), _job("low")),
    "queued_twice  ": (lambda p: p.db.zadd(p.keys.later[2], {later_member(0, p.low.id): 1}), _job("low")),
    "wrong_queue": (lambda p: p.db.hset(p.keys.job(p.low.id), "q", 0), _job("low")),
    "queued_with_owner": (lambda p: p.db.hset(p.keys.job(p.low.id), "w", "w1"), _job("low")),
    "not_held": (lambda p: p.db.srem(p.keys.held("w1"), p.running.id), _job("running")),
    "no_owner": (lambda p: p.db.zrem(p.keys.workers, "w1"), _job("running")),
    "orphan": (lambda p: p.db.zrem(p.keys.workers, "w1"), "worker:w1"),
    "orphan ": (lambda p: p.db.sadd(p.keys.held("gone"), p.running.id), "held:gone"),
    "held_wrongly": (lambda p: p.db.sadd(p.keys.held("w1"), p.queued.id), "held:w1"),
    "held_wrongly ": (lambda p: p.db.delete(p.keys.job(p.running.id)), "held:w1"),
    "prefers_wrongly": (lambda p: p.db.zadd(p.keys.prefers, {p.running.id: 1}), "prefers"),
    "queued_wrongly": (lambda p: p.db.zadd(p.keys.queues[1], {p.running.id: 1}), "queued:1"),
    "queued_wrongly ": (lambda p: p.db.zadd(p.keys.queues[0], {p.low.id: 1}), "queued:0"),
    "later_wrongly": (lambda p: p.db.zadd(p.keys.later[1], {later_member(5, p.running.id): 1}), "later:1"),
    "not_in_client": (lambda p: p.db.srem(p.keys.client("client"), p.low.id), _job("low")),
    "client_wrongly": (lambda p: p.db.sadd(p.keys.client("client"), p.done.id), "client:client"),
    "client_wrongly ": (lambda p: p.db.sadd(p.keys.client("other"), p.low.id), "client:other"),
    "not_in_deadlines": (lambda p: p.db.zrem(p.keys.deadlines, p.queued.id), _job("queued")),
    "deadline_wrongly": (lambda p: p.db.zadd(p.keys.deadlines, {p.done.id: 1}), "deadlines"),
    "load_jobs": (lambda p: p.db.hincrby(p.keys.load, "jobs", 1), "load"),
    "load_jobs ": (lambda p: p.db.hincrby(p.keys.load, "done", -1), "load"),
    "load_jobs  ": (lambda p: p.db.delete(p.keys.client("client")), "load"),
    "load_bytes": (lambda p: p.db.hincrby(p.keys.load, "bytes", -1), "load"),
    "load_bytes ": (lambda p: p.db.hincrby(p.keys.job(p.low.id), "z", 1), "load"),
    "load_saved": (lambda p: p.db.hincrby(p.keys.load, "saved", -1), "load"),
    "load_saved ": (lambda p: p.db.hincrby(p.keys.job(p.running.id), "kk", 1), "load"),
    "load_letters": (lambda p: p.db.hincrby(p.keys.load, "letters", 1), "load"),
    "load_letters ": (lambda p: p.db.zadd(p.keys.letters, {"1-1 100": 1}), "load"),
    "load_unread": (lambda p: p.db.hincrby(p.keys.unread, "client", 1), "load"),
    "unknown_state": (lambda p: p.db.hset(p.keys.job(p.low.id), "st", "x"), _job("low")),
    "no_ttl": (lambda p: p.db.persist(p.keys.job(p.done.id)), _job("done")),
    "no_ttl ": (lambda p: p.db.persist(p.keys.reply("client")), "reply:client"),
    "no_ttl  ": (lambda p: p.db.persist(p.keys.ward), "ward"),
    "no_ttl   ": (lambda p: p.db.hset(p.keys.epoch(3), "st", "open"), "epoch:3"),
    "unexpected_ttl": (lambda p: p.db.expire(p.keys.job(p.low.id), 100), _job("low")),
    "unexpected_ttl ": (lambda p: p.db.expire(p.keys.load, 100), "load"),
    "unknown_key": (lambda p: p.db.set(f"{p.keys.prefix}lock:x", 1), "lock:x"),
    "unknown_key ": (lambda p: p.db.set(f"{p.keys.prefix}queued:7", 1, ex=9), "queued:7"),
    "wrong_type": (lambda p: p.db.set(p.keys.held("w1"), 1), "held:w1"),
    "wrong_type ": (lambda p: p.db.set(p.keys.workers, 1), "workers"),
    "wrong_type  ": (lambda p: p.db.set(p.keys.job(p.low.id), 1), _job("low")),
}


@pytest.mark.parametrize("damage", DAMAGE)
async def test_each_kind_of_damage_is_found(damage: str, pool: Pool) -> None:
    do, where = DAMAGE[damage]
    expected = (damage.strip(), where if isinstance(where, str) else where(pool))
    await do(pool)
    report = await audit(pool.db)
    assert expected in kinds(report)
    assert all(set(one) == {"kind", "key", "detail"} and one["detail"] for one in report["violations"])


async def test_what_moves_while_it_is_read_is_no_violation(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that come, start and become suspects after the suspects were read, clients that come after they were listed:
    every time."""
    suspects, totals = Looker.suspects, Looker.totals
    mover = Lease(pool.db, "default", "w3", 600.0)
    await mover.join(status("w3"))

    async def moving_suspects(self: Looker) -> Any:
        await pool.broker.enqueue([job() for _ in range(9)])
        found = await suspects(self)
        lost, *_ = await mover.claim(4, 99, 0)
        assert await mover.release([Release(lost.job_id, lost.attempt, lost=True)], 2) == ["ok"]
        await pool.broker.enqueue([job() for _ in range(9)])
        return found

    async def moving_totals(self: Looker, clients: Any) -> Any:
        await pool.broker.enqueue([job(reply_to=new_id())])
        return await totals(self, clients)

    monkeypatch.setattr(Looker, "suspects", moving_suspects)
    monkeypatch.setattr(Looker, "totals", moving_totals)
    report = await audit(pool.db)
    assert report["violations"] == []
    assert report["checked"]["again"] > 0  # it had to look again
    assert report["not_judged"] == ["load.bytes and load.saved: clients come and go faster than they can be looked at"]
    await pool.db.srem(pool.keys.client("client"), pool.low.id)
    await pool.db.delete(pool.keys.later[1])
    await pool.db.hincrby(pool.keys.load, "jobs", 7)
    found = kinds(await audit(pool.db))
    assert {(kind, key) for kind, key in found if kind != "load_bytes"} == {
        ("not_in_client", f"job:{pool.low.id}"),
        ("not_queued", f"job:{pool.waiting.id}"),
        ("load_jobs", "load"),
    }


async def test_no_more_is_reported_than_was_asked_for(pool: Pool) -> None:
    await pool.broker.enqueue([job() for _ in range(50)])
    await pool.db.delete(pool.keys.queues[1])
    report = await audit(pool.db, most=10)
    assert (len(report["violations"]), report["more_violations"]) == (10, 0)
    assert report["not_judged"] == ["jobs: 41 more look wrong; repair what is reported first"]


async def test_a_name_that_is_a_pattern_is_only_itself(redis_db: str) -> None:
    async with connect(redis_db) as db:
        await db.set("rmq:{de.ault}:x", 1)
        await db.set("rmq:{default}x", 1)
        assert (await audit(db))["checked"]["keys"] == 0


@asynccontextmanager
async def traffic(url: str) -> AsyncIterator[list[int]]:
    """A pool in the middle of everything: clients come and go, cancel, set deadlines, crash; workers crash and join."""
    finished = [0]
    tasks: list[asyncio.Task[None]] = []

    async def clients(number: int) -> None:
        for round_ in itertools.count():
            async with RolloutClient(url, client_id=f"c{number}-{round_ % 7}") as client:
                for size in (1, 150):
                    jobs = [
                        GenerateJob(
                            token_ids=[1, 2, 3],
                            n=1 + i % 2,
                            deadline_s=[None, 0.05, 30.0][i % 3],
                            priority="low" if i % 2 else "high",
                        )
                        for i in range(size)
                    ]
                    handles = await client.submit_many(jobs)
                    await client.broker.cancel([handle.job_id for handle in handles[::5]])
                async for _ in client.results(timeout=20):
                    finished[0] += 1

    async def crashes() -> None:
        while True:
            engine = ScriptedEngine(tokens_per_s=2000)
            async with worker(url, engine=engine, lease_s=0.3, max_lost=9, max_running=16) as running:
                await eventually(lambda running=running: running.worker._held, what="it has something to lose")
                await running.crash()

    with contextlib.suppress(asyncio.CancelledError):
        async with worker(url, engine=ScriptedEngine(tokens_per_s=1000), max_running=32, max_lost=9, lease_s=1.0):
            tasks += [asyncio.create_task(clients(number)) for number in range(3)]
            tasks.append(asyncio.create_task(crashes()))
            try:
                yield finished
                for task in tasks:
                    assert not task.done() or task.result() is None
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_busy_pool_is_clean_and_damage_is_found_in_it(redis_db: str) -> None:
    async with connect(redis_db) as db, traffic(redis_db) as finished:
        await eventually(lambda: finished[0] > 100, timeout=30)
        for _ in range(3):
            at = finished[0]
            report = await audit(db, pause_s=0.05)
            assert report["violations"] == []
            assert report["checked"]["jobs"] > 100
            await eventually(lambda at=at: finished[0] > at, timeout=30)  # it was busy, and still is
        keys = Broker(db, "default").keys
        await db.hincrby(keys.load, "jobs", 1)
        await db.hset(keys.job(lost := new_id()), mapping={"st": "q", "q": 1, "y": "c", "z": 1})
        assert {("load_jobs", "load"), ("not_queued", f"job:{lost}"), ("not_in_client", f"job:{lost}")} == kinds(
            await audit(db, pause_s=0.05)
        )
