"""Engines, workers and servers that die or freeze: nothing is lost, nothing is published twice."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from support.pools.pool import (
    check_scripted,
    eventually,
    record,
    replies,
    runs,
    shard_with,
    short_retries,
    wait_replies,
    worker,
)
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, EngineError, Finished, RolloutResult, SamplingParams, connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.lease.heartbeat import Membership
from rolloutmq.worker.scripted.engine import ScriptedEngine

SHORT = SamplingParams(max_new_tokens=5)
SOME = SamplingParams(max_new_tokens=40)
LONG = SamplingParams(max_new_tokens=1000)
OFTEN = 1000
"""`max_lost` of a worker whose lease is meant to end: on a busy machine it may also end when it is not meant to."""


def all_scripted(found: list[Any], samples: int) -> list[RolloutResult]:
    results = [reply.outcome for reply in found]
    assert all(isinstance(one, RolloutResult) for one in results), results
    assert len({(one.job_id, one.sample) for one in results}) == samples
    for one in results:
        check_scripted(one, 3)
    return results


async def test_a_killed_engine_is_restarted_and_everything_is_answered_once(redis_db: str, broker: Broker) -> None:
    engine = ScriptedEngine(tokens_per_s=100)
    async with worker(redis_db, engine=engine, max_running=8) as running:
        await broker.enqueue([job(n=2, sampling=SOME) for _ in range(12)])
        await eventually(lambda: runs(engine))
        engine.kill()
        engine.tokens_per_s = 1e9
        all_scripted(await wait_replies(broker, 24), 24)
        assert engine.starts == 2
        assert running.status.engine_restarts == 1
    load = await broker.load()
    assert (load.dead, load.done) == (0, 12)


async def test_the_neighbour_takes_over_while_the_engine_restarts(redis_db: str, broker: Broker) -> None:
    broken, sound = ScriptedEngine(tokens_per_s=1), ScriptedEngine()
    async with worker(redis_db, engine=broken):
        await broker.enqueue([job(sampling=LONG) for _ in range(4)])
        await eventually(lambda: runs(broken, 4))
        async with worker(redis_db, engine=sound) as second:
            broken.start_s = 3600.0
            broken.kill()
            results = all_scripted(await wait_replies(broker, 4), 4)
            assert {one.worker_id for one in results} == {second.id}


class Fragile(ScriptedEngine):
    """A prompt that begins with 666 kills it."""

    async def generate(self, request: Any) -> Any:
        if request.token_ids[0] == 666:
            self.kill()
        return await super().generate(request)


async def test_a_job_that_kills_engines_is_buried_and_its_neighbours_live(redis_db: str, broker: Broker) -> None:
    poison, fine = job(token_ids=[666]), [job(sampling=SHORT) for _ in range(3)]
    await broker.enqueue([*fine, poison])
    async with worker(redis_db, engine=Fragile(), max_lost=3) as running:
        outcomes = {reply.outcome.job_id: reply.outcome for reply in await wait_replies(broker, 4)}
        assert all(outcomes[one.id].ok for one in fine)
        found = outcomes[poison.id]
        assert (found.cause, found.attempts) == ("the engine under it died or failed 3 times", 3)
        await eventually(lambda: running.engine.starts == 4)
        await broker.enqueue([job(sampling=SHORT)])
        await wait_replies(broker, 5)


async def test_an_engine_that_always_dies_ends_the_worker(redis_db: str, broker: Broker) -> None:
    class Doomed(ScriptedEngine):
        async def start(self) -> None:
            await super().start()
            if self.starts > 1:
                self.kill()

    async with worker(redis_db, engine=Doomed(), engine_restarts=2) as running:
        running.engine.kill()
        with pytest.raises(EngineError, match="without finishing a sample"):
            await running.task


async def test_a_crashed_workers_jobs_are_finished_by_the_other(redis_db: str, broker: Broker) -> None:
    slow = ScriptedEngine(tokens_per_s=2)
    jobs = [job(n=2, sampling=SHORT) for _ in range(10)]
    async with worker(redis_db, engine=slow, max_running=8) as crashing:
        await broker.enqueue(jobs)
        await eventually(lambda: runs(slow, 8))
        await crashing.die()
        assert sum([await part.redis.scard(part.keys.held(crashing.id)) for part in broker.parts]) >= 4
        async with worker(redis_db) as other:
            results = all_scripted(await wait_replies(broker, 20), 20)
            assert {one.worker_id for one in results} == {other.id}
            assert {one.attempt for one in results} == {1, 2}
            await eventually(lambda: _are_there(broker, other.id))
    load = await broker.load()
    assert (load.open_jobs, load.done, load.dead) == (0, 10, 0)


async def _are_there(broker: Broker, *workers: str) -> bool:
    return [seen.worker_id for seen in await broker.workers()] == [*workers]


@pytest.mark.one_shard  # over several a worker keeps its name, and joins again where its lease was lost
async def test_a_stalled_worker_loses_its_jobs_and_its_late_results_are_refused(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats get lost while everything else still works."""
    slow = ScriptedEngine(tokens_per_s=1)
    async with worker(redis_db, engine=slow, lease_s=0.5, max_lost=OFTEN) as stalled:

        async def lost(*_: object) -> None:
            raise ConnectionResetError("lost on the way")

        one = job(sampling=SHORT)
        await broker.enqueue([one])
        await eventually(lambda: runs(slow))
        lease, first_id = stalled.worker._lease, stalled.id
        assert lease is not None
        monkeypatch.setattr(lease, "heartbeat", lost)
        async with worker(redis_db, max_lost=OFTEN):
            (found,) = all_scripted(await wait_replies(broker, 1), 1)
            assert found.worker_id != first_id
        await eventually(lambda: stalled.id != first_id, what="a new incarnation")
        await eventually(lambda: runs(slow, 0), what="the lost job to be dropped")
        assert await lease.complete([Finished(one.id, 1, 0, result(one, worker=first_id))]) in (["again"], ["fenced"])
        assert len(await replies(broker)) == 1


async def test_a_frozen_redis_fences_the_worker_and_it_comes_back(
    redis_url: str, redis_server: EmbeddedRedis, further_redis: list[EmbeddedRedis]
) -> None:
    engine = ScriptedEngine(tokens_per_s=1)
    async with connect(redis_url, pool="default") as db:
        broker = broker_of(db, "default")
        async with worker(redis_url, engine=engine, lease_s=0.6, max_lost=OFTEN) as running:
            one = job(sampling=LONG)
            await broker.enqueue([one])
            await eventually(lambda: runs(engine))
            first_id, lease = running.id, running.worker._lease
            assert lease is not None
            servers = [redis_server, *further_redis]
            try:
                for server in servers:
                    os.kill(server.pid, signal.SIGSTOP)
                await eventually(lambda: runs(engine, 0), what="the worker to drop what it held")
            finally:
                for server in servers:
                    os.kill(server.pid, signal.SIGCONT)
            engine.tokens_per_s = 1e9
            (found,) = all_scripted(await wait_replies(broker, 1), 1)
            assert found.attempt > 1
            assert (running.id == first_id) == (len(broker.parts) > 1)  # over several shards it keeps its name
            late = Finished(one.id, 1, 0, result(one, worker=first_id))
            assert await lease.complete([late]) in (["again"], ["fenced"])
            assert len(await replies(broker)) == 1


@pytest.mark.one_shard
async def test_redis_away_for_longer_than_any_timeout(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed and back later with its append-only file: the worker is still there and goes on."""
    short_retries(monkeypatch)
    engine, brief = ScriptedEngine(tokens_per_s=1), {"lease_s": 0.4, "max_lost": OFTEN}
    with EmbeddedRedis(directory=tmp_path, appendonly=True, config={"appendfsync": "always"}) as server:
        async with connect(server.url) as db, worker(server.url, engine=engine, **brief) as running:
            broker = Broker(db, "default")
            jobs = [job(sampling=SHORT) for _ in range(5)]
            await broker.enqueue(jobs)
            await eventually(lambda: runs(engine, 5))
            first_id = running.id
            server.kill()
            await eventually(lambda: runs(engine, 0), what="the jobs to be dropped")
            gone = running.id
            await eventually(lambda: running.id not in {gone, first_id}, what="attempts to join again")
            assert not running.task.done()
            await asyncio.to_thread(server.start)
            engine.tokens_per_s = 1e9
            all_scripted(await wait_replies(broker, 5), 5)


@pytest.mark.one_shard
async def test_a_lost_lease_does_not_wait_for_a_frozen_reap(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat came through, then Redis froze under the next command: the lease is over in time all the same."""
    engine = ScriptedEngine(tokens_per_s=1)
    # full, so that it does not learn from a claim that its lease is over
    async with worker(redis_db, engine=engine, lease_s=0.5, max_running=1, prefetch=0, max_lost=OFTEN) as running:
        await broker.enqueue([job(sampling=LONG)])
        await eventually(lambda: runs(engine))
        lease = running.worker._lease
        assert lease is not None

        async def frozen(*_: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(lease, "reap", frozen)
        await eventually(lambda: running.worker._lease is not lease, what="the lease to be given up")


async def test_a_drain_while_weights_are_waited_for_in_drain_mode(redis_db: str, broker: Broker) -> None:
    """The update lets running samples finish; the worker is told to leave meanwhile, and leaves in its time."""
    import torch  # noqa: PLC0415

    from rolloutmq import WeightPublisher  # noqa: PLC0415

    engine = ScriptedEngine(tokens_per_s=2)
    source = await asyncio.to_thread(
        lambda: WeightPublisher(redis_db, mode="drain", join_timeout_s=600.0, transfer_timeout_s=1.0)
    )
    try:
        async with worker(redis_db, engine=engine, max_running=2, prefetch=0, drain_s=0.5) as running:
            await broker.enqueue([job(n=4, sampling=LONG)])
            await eventually(lambda: runs(engine, 2))
            handle = source.publish(1, {"one": torch.ones(3)})
            await eventually(lambda: not running.generation.gate.is_open)
            assert await runs(engine, 2)  # they run on
            await running.stop()
        report = await asyncio.to_thread(handle.wait, 60)  # not at the deadline, but as soon as the worker has left
        assert (report.state, set(report.failures)) == ("failed", {running.id})
        assert (await broker.load()).queued == (0, 1, 0)
    finally:
        await asyncio.to_thread(source.close)


async def test_a_job_that_a_failover_gave_back_to_a_worker_that_forgot_it(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publication was lost with the old primary: the worker has forgotten the job, Redis has it running there."""
    one = job(sampling=SHORT)
    await broker.enqueue([one])
    part = shard_with(broker, one.id)
    db, key, before = part.redis, part.keys.job(one.id), await record(broker, one.id)
    monkeypatch.setattr(WorkerConfig, "beat_s", 0.1)
    async with worker(redis_db) as running:
        (reply,) = await wait_replies(broker, 1)
        await part.ack("client", [reply])
        await db.delete(key)
        await db.hset(key, mapping=before | {"st": "r", "w": running.id, "a": 1})
        await db.persist(key)
        await db.sadd(part.keys.held(running.id), one.id)
        (again,) = await wait_replies(broker, 1)
        assert again.outcome.attempt == 2
        assert await db.scard(part.keys.held(running.id)) == 0


async def test_a_busy_worker_takes_nothing_of_its_own_for_a_stray(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerConfig, "beat_s", 0.1)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=500.0), max_running=16):
        jobs = [job(n=2, sampling=SamplingParams(max_new_tokens=20)) for _ in range(300)]
        await broker.enqueue(jobs)
        found = await wait_replies(broker, 600)
    assert {reply.outcome.attempt for reply in found if isinstance(reply.outcome, RolloutResult)} == {1}


async def test_all_of_a_dead_workers_jobs_come_back_with_one_heartbeat(broker: Broker, joined, expire_lease) -> None:
    lease, survivor = await joined("victim"), await joined("survivor")
    await broker.enqueue([job(sampling=SHORT) for _ in range(700)])
    while sum([len(await part.held()) for part in lease.parts]) < 700:
        await lease.claim(256, 256, 0)
    await expire_lease(lease)
    for part in survivor.parts:
        await Membership(part, 1.0, 3)._reap()
        assert not await part.redis.exists(part.keys.held("victim"))
    assert (await broker.load()).queued == (0, 700, 0)
