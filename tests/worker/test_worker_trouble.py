"""An engine that fails, hangs or dies at a bad moment; a worker that is stopped before it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.pools.pool import check_scripted, eventually, wait_replies, worker
from support.specimens.messages import job

from rolloutmq.messages import Broker, EngineError, Lease, LeaseLost, SamplingParams
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.lease import Membership
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

SHORT = SamplingParams(max_new_tokens=5)
LONG = SamplingParams(max_new_tokens=400)


async def test_an_engine_that_dies_while_results_wait_to_be_published(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job with one sample in the outbox and one in the engine is handed back too, after the first is out."""
    through = asyncio.Event()
    complete = Lease.complete

    async def held_up(self: Lease, finished: Any) -> list[str]:
        await through.wait()
        return await complete(self, finished)

    monkeypatch.setattr(Lease, "complete", held_up)
    engine = ScriptedEngine(tokens_per_s=2000)
    both = job(n=2, sampling=LONG)
    async with worker(redis_db, engine=engine, max_running=1, prefetch=0) as running:
        await broker.enqueue([both])
        await eventually(lambda: running.worker._outbox.jobs() == {both.id} and running.generation.running)
        engine.kill()
        await eventually(running.generation.state.dead.is_set)
        through.set()
        results = [reply.outcome for reply in await wait_replies(broker, 2)]
        assert engine.starts == 2
    for result in results:
        check_scripted(result, 3)
    assert {result.sample for result in results} == {0, 1}


async def test_a_drain_ends_an_engines_start(redis_db: str) -> None:
    engine = ScriptedEngine(start_s=3600)
    starting = Worker(WorkerConfig(redis_url=redis_db), engine, NoTokenizer())
    task = asyncio.create_task(starting.run())
    await asyncio.sleep(0)
    starting.drain()
    await task
    assert engine.starts == 0


async def test_transfers_are_followed_after_redis_lost_its_numbers(redis_db: str, broker: Broker) -> None:
    publisher_module = pytest.importorskip("rolloutmq.sync.publish.publisher")
    torch = pytest.importorskip("torch")
    async with worker(redis_db) as running:
        running.worker._follower._seen_epoch = 1000

        def publish() -> str:
            with publisher_module.WeightPublisher(redis_db) as publisher:
                return str(publisher.publish(1, [("w", torch.ones(3))]).wait(20).state)

        assert await asyncio.to_thread(publish) == "committed"
        assert running.generation.version == 1


async def test_a_failed_job_is_tried_again_though_redis_is_away_for_a_moment(
    redis_db: str, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, refusals = Lease.release, iter([True])

    async def away_once(self: Lease, *arguments: Any) -> list[str]:
        if next(refusals, False):
            raise ConnectionError("Redis is away")
        return await release(self, *arguments)

    class Moody(ScriptedEngine):
        failures = iter([True])

        async def generate(self, request: EngineRequest) -> EngineOutput:
            if next(self.failures, False):
                raise EngineError("503: come back later")
            return await super().generate(request)

    monkeypatch.setattr(Lease, "release", away_once)
    async with worker(redis_db, engine=Moody()):
        await broker.enqueue([job(sampling=SHORT)])
        (reply,) = await wait_replies(broker, 1)
    assert reply.outcome.ok
    assert reply.outcome.attempt == 2


@pytest.mark.one_shard
async def test_a_cancellation_that_meets_the_loss_of_the_lease_ends_the_worker(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose = asyncio.Event()

    async def loses_its_lease(*_: Any) -> None:
        await lose.wait()
        raise LeaseLost("others have the jobs")

    monkeypatch.setattr(Membership, "run", loses_its_lease)
    one = Worker(WorkerConfig(redis_url=redis_db), ScriptedEngine(), NoTokenizer())
    running = asyncio.create_task(one.run())
    await one.joined.wait()
    for _ in range(3):
        await asyncio.sleep(0)  # every part of the incarnation has begun
    lose.set()
    running.cancel()
    one.joined.clear()
    again = asyncio.create_task(one.joined.wait())
    await asyncio.wait([running, again], return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    lose.clear()
    if not running.done():  # it has joined again
        one.drain()
        await running
    assert running.cancelled()


@pytest.mark.one_shard
async def test_a_lease_that_is_lost_while_the_worker_leaves_does_not_cancel_it(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loses_its_lease_at_the_end(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise LeaseLost("others have the jobs")

    monkeypatch.setattr(Membership, "run", loses_its_lease_at_the_end)
    one = Worker(WorkerConfig(redis_url=redis_db), ScriptedEngine(), NoTokenizer())
    running = asyncio.create_task(one.run())
    await one.joined.wait()
    one.drain()
    await asyncio.wait([running])
    assert not running.cancelled()
    assert running.exception() is None
