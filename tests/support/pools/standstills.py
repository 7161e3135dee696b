"""Pools that stand still, each made for real, up to the moment at which Redis can show it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import Running, eventually, looked, status, worker
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, RolloutClient, SamplingParams
from rolloutmq.messages import Broker, Caps, Lease
from rolloutmq.messages.errors import EngineDead, PoolBusy
from rolloutmq.messages.ids import new_id
from rolloutmq.messages.scripts import Scripts, calls
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer import Ledger, VersionHolder
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine import EngineInfo, EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text.tokenizer import NoTokenizer
from rolloutmq.worker.worker import Worker

LONG = SamplingParams(max_new_tokens=100_000)
"""Many minutes of a slow engine."""
LEASE_S = 2.0


class Scene:
    """A pool, and what stands in it until the test's end. waiting: a job that does not run."""

    def __init__(self, url: str, db: Redis, client: RolloutClient, stack: AsyncExitStack) -> None:
        self.url, self.db, self.client, self.stack = url, db, client, stack
        self.broker, self.ledger = Broker(db, "default"), Ledger(db, "default")
        self.waiting: Any = None

    async def worker(self, engine: ScriptedEngine | None = None, **config: Any) -> Running:
        """A worker that is there until the end, and then goes without a word."""
        running = await self.stack.enter_async_context(
            worker(self.url, engine=engine or slow(), **({"lease_s": LEASE_S, "drain_s": 0.0} | config))
        )
        self.stack.push_async_callback(running.crash)
        return running

    async def submit(self, given: GenerateJob | None = None) -> Any:
        self.waiting = await self.client.submit(given or tokens())
        return self.waiting

    async def shown(self, block: str) -> None:
        """Wait until a worker says that this keeps it from serving."""

        async def says() -> bool:
            return any(block in it.blocks for it in await self.broker.workers())

        await eventually(says, what=block)

    async def aside(self, count: int = 1) -> None:
        """Wait until so many jobs are put aside."""

        async def are() -> bool:
            return sum([await self.db.zcard(later) for later in self.broker.keys.later]) == count

        await eventually(are, what="put aside")

    async def commit(self, version: int, address: str | None = None) -> None:
        """Let a version be committed, which somebody offers at an address."""
        await self.db.hset(self.broker.keys.weights, mapping={"committed": version, "digest": "d"})
        if address is not None:
            await self.db.hset(self.broker.keys.holders, "", VersionHolder(version, address, "secret").to_json())

    async def never_answers(self) -> str:
        """The address of a trainer that takes connections, and says nothing."""
        over = asyncio.Event()

        async def silent(*_: Any) -> None:
            await over.wait()

        server = await asyncio.start_server(silent, "127.0.0.1")
        self.stack.callback(server.close)
        self.stack.callback(over.set)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def slow() -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=50.0)


class Able(ScriptedEngine):
    """Has a feature, or a context of its own."""

    def __init__(self, *features: str, context: int = 1 << 20, tasks: tuple[str, ...] = ()) -> None:
        super().__init__(tokens_per_s=50.0)
        self.tasks, self._more, self._context = frozenset(tasks), frozenset(features), context

    @property
    def info(self) -> EngineInfo:
        info = super().info
        return replace(info, features=info.features | self._more, context_length=self._context)


class Fragile(ScriptedEngine):
    """Dies of every sample."""

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self.kill()
        raise EngineDead("it dies of this")


async def no_worker(scene: Scene) -> None:
    await scene.submit()


async def silent_worker(scene: Scene) -> None:
    running = await scene.worker(lease_s=0.5)
    await running.crash()
    await scene.submit()
    await asyncio.sleep(0.5)  # its lease


async def starting(scene: Scene) -> None:
    await scene.commit(3, await scene.never_answers())
    await scene.worker()
    await scene.submit()
    await scene.shown("version")


async def loading(scene: Scene) -> None:
    engine = slow()
    engine.start_s = 3600.0
    settings = WorkerConfig(redis_url=scene.url, drain_s=0.0)
    running = Running(Worker(settings, engine, NoTokenizer()), engine)
    scene.stack.push_async_callback(running.crash)
    await scene.submit()
    await eventually(lambda: scene.db.exists(scene.broker.keys.starting))


async def behind(scene: Scene) -> None:
    running = await scene.worker()
    await looked(running)
    await scene.commit(3, await scene.never_answers())
    running.generation.state.doubted()
    await scene.submit()
    await scene.shown("version")


async def behind_what_jobs_need(scene: Scene, **wants: int) -> None:
    await looked(await scene.worker())
    await scene.commit(3, await scene.never_answers())
    await scene.submit(tokens(**(wants or {"min_version": 3})))
    await scene.aside()


async def too_stale(scene: Scene) -> None:
    await behind_what_jobs_need(scene, max_staleness=0)


async def weights_lost(scene: Scene, address: str | None = None) -> None:
    await scene.commit(3, address)
    await scene.worker()
    await scene.submit()
    await scene.shown("unavailable")


async def weights_lost_by_a_dead_trainer(scene: Scene) -> None:
    await weights_lost(scene, "127.0.0.1:9")


async def version_ahead(scene: Scene, **wants: int) -> None:
    await scene.worker()
    await scene.submit(tokens(**(wants or {"min_version": 7})))
    await scene.aside()


async def version_elsewhere(scene: Scene) -> None:
    await version_ahead(scene, exact_version=7)


async def by_command(scene: Scene, action: str, block: str, **params: Any) -> None:
    await scene.worker()
    async with PoolControl(scene.url) as control:
        (await control.send(action, params)).check()
    await scene.submit()
    await scene.shown(block)


async def paused(scene: Scene) -> None:
    await by_command(scene, "pause", "pause", mode="interrupt")


async def asleep(scene: Scene) -> None:
    await by_command(scene, "sleep", "asleep")


async def stale_weights(scene: Scene) -> None:
    await by_command(scene, "sleep", "asleep")
    async with PoolControl(scene.url) as control:
        (await control.wake()).check()

    async def awake() -> bool:
        return not any("asleep" in it.blocks for it in await scene.broker.workers())

    await eventually(awake)


async def draining(scene: Scene) -> None:
    running = await scene.worker()
    await scene.client.submit(tokens(sampling=LONG))
    await eventually(lambda: running.generation.running == 1)
    running.worker.drain(60)
    await scene.submit()

    async def says() -> bool:
        return [it.state for it in await scene.broker.workers()] == ["draining"]

    await eventually(says)


async def quarantined(scene: Scene) -> None:
    running = await scene.worker()
    running.generation.state.broken(patient=True)
    await scene.submit()
    await scene.shown("quarantine")


async def engine_down(scene: Scene) -> None:
    running = await scene.worker()
    running.engine.start_s = 3600.0
    running.engine.kill()
    await scene.submit()
    await scene.shown("dead")


async def restart_loop(scene: Scene) -> None:
    running = await scene.worker(Fragile(), max_lost=1000, engine_restarts=1000)
    await scene.submit()
    await eventually(lambda: running.status.restarts_in_a_row >= 2)


async def only(scene: Scene, able: Able, given: GenerateJob, plain: Able | None = None) -> None:
    """A job that only a worker could do that is gone by now."""
    there = await scene.worker(able)
    async with PoolControl(scene.url) as control:
        (await control.pause()).check()
    await scene.worker(plain or Able())
    await scene.submit(given)
    await scene.aside()
    await there.die()
    await eventually(lambda: _gone(scene, there.id))


async def _gone(scene: Scene, worker_id: str) -> bool:
    return all(it.worker_id != worker_id for it in await scene.broker.workers())


async def needs(scene: Scene) -> None:
    await only(scene, Able("seed"), tokens(seed=1))


async def context(scene: Scene) -> None:
    sampling = SamplingParams(max_new_tokens=5000)
    await only(scene, Able(context=1 << 16), tokens(sampling=sampling), Able(context=2048))


async def no_worker_of_a_task(scene: Scene) -> None:
    there = await scene.worker(Able(tasks=("task:score",)))
    async with PoolControl(scene.url) as control:
        (await control.pause()).check()
    await scene.worker(Able())
    scoring = asyncio.create_task(scene.client.score([1, 2], [[3]]))
    scene.stack.callback(scoring.cancel)
    await scene.aside()
    await there.die()
    await eventually(lambda: _gone(scene, there.id))
    await scene.submit(tokens(sampling=LONG))


async def adapter(scene: Scene) -> None:
    engine = slow()
    engine.lora = True
    await scene.worker(engine)
    await Scripts(scene.db, scene.broker.keys).run(calls.learn(0, ("math", 1)))
    await scene.submit(tokens(lora="math", min_adapter_version=2))
    await scene.aside()


async def full(scene: Scene, caps: Caps) -> None:
    other = await scene.stack.enter_async_context(RolloutClient(scene.url, caps=caps))

    async def submit() -> None:
        while True:
            with contextlib.suppress(PoolBusy):
                await other.submit_many([tokens(sampling=LONG)], timeout=0.5)

    task = asyncio.create_task(submit())
    scene.stack.callback(task.cancel)

    async def refused() -> bool:
        return bool(await scene.db.hexists(scene.broker.keys.load, "busy"))

    await eventually(refused)


async def pool_full(scene: Scene) -> None:
    await scene.worker()
    await scene.submit(tokens(sampling=LONG))
    await full(scene, Caps(jobs=1))


async def client_full(scene: Scene) -> None:
    await scene.worker()
    await scene.submit(tokens(sampling=LONG))
    await scene.db.hset(scene.broker.keys.unread, "reader", 100)
    lazy = await scene.stack.enter_async_context(RolloutClient(scene.url, client_id="reader", caps=Caps(unread=1)))
    with pytest.raises(PoolBusy, match="has not taken"):
        await lazy.submit(tokens())


async def redis_memory(scene: Scene) -> None:
    await scene.worker()
    await scene.submit(tokens(sampling=LONG))
    await scene.db.config_set("maxmemory", "1mb")
    scene.stack.push_async_callback(scene.db.config_set, "maxmemory", "0")


async def suspect(scene: Scene) -> None:
    running = await scene.worker(max_lost=2)
    doomed = await scene.client.submit(tokens(sampling=LONG))
    await eventually(lambda: running.generation.running == 1)
    running.engine.kill()

    async def alone() -> bool:
        return await scene.db.hget(scene.broker.keys.worker(running.id), "alone") == doomed.job_id.encode()

    await eventually(alone)
    await scene.submit()


async def unclaimed(scene: Scene) -> None:
    lease = Lease(scene.db, "default", "w1", 60.0)
    await lease.join(status("w1", max_running=8))
    await scene.submit(tokens(id=new_id(int(time.time() * 1000) - 10_000)))


async def preferred(scene: Scene) -> None:
    busy = await scene.worker(max_running=1, prefetch=0)
    await scene.client.submit(tokens(sampling=LONG))
    await eventually(lambda: busy.generation.running == 1)
    await scene.worker()
    await scene.submit(tokens(prefer_worker=busy.id, prefer_s=60.0))
    await scene.aside()


async def only_slow(scene: Scene) -> None:
    running = await scene.worker(max_running=1, prefetch=0)
    await scene.client.submit(tokens(sampling=LONG))
    await eventually(lambda: running.generation.running == 1)
    await scene.submit()


Make = Callable[[Scene], Awaitable[None]]
TABLE: list[tuple[str, Make]] = [
    ("no-worker", no_worker),
    ("no-worker", silent_worker),
    ("starting", starting),
    ("starting", loading),
    ("behind", behind),
    ("behind", behind_what_jobs_need),
    ("staleness", too_stale),
    ("weights-lost", weights_lost),
    ("weights-lost", weights_lost_by_a_dead_trainer),
    ("version-ahead", version_ahead),
    ("exact-version", version_elsewhere),
    ("paused", paused),
    ("asleep", asleep),
    ("stale-weights", stale_weights),
    ("draining", draining),
    ("quarantined", quarantined),
    ("engine-down", engine_down),
    ("restart-loop", restart_loop),
    ("needs", needs),
    ("context", context),
    ("task", no_worker_of_a_task),
    ("adapter", adapter),
    ("pool-full", pool_full),
    ("client-full", client_full),
    ("redis-memory", redis_memory),
    ("suspect", suspect),
    ("unclaimed", unclaimed),
    ("preferred", preferred),
    ("slow", only_slow),
]
