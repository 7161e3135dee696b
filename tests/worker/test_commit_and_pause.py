"""Pauses and interruptions while weights are being changed: nothing starts, and no engine is taken for dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engines.manual import all_that_can_happen_now
from support.peers.publishing import patient, publish
from support.pools.commanded import all_done, busy, worker
from support.pools.pool import Running, eventually

from rolloutmq.messages import Broker
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.scripted.engine import ScriptedEngine


class SlowLoad(ScriptedEngine):
    """A commit begins when it is asked for and ends when the test says so."""

    def __init__(self) -> None:
        super().__init__(tokens_per_s=20.0)  # nothing ends by itself while a test looks
        self.loading, self.load = asyncio.Event(), asyncio.Event()
        self.started_while_loading: list[str] = []

    async def generate(self, request: EngineRequest) -> EngineOutput:
        if self.loading.is_set() and not self.load.is_set():
            self.started_while_loading.append(request.request_id)
        return await super().generate(request)

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        self.loading.set()
        await self.load.wait()
        return await super().commit_weights(order)


@asynccontextmanager
async def committing(redis_db: str, broker: Broker, mode: UpdateMode) -> AsyncIterator[tuple[Running, SlowLoad, Any]]:
    """A worker in the midst of a commit, which held three jobs when it began: the worker, its engine, the jobs."""
    engine = SlowLoad()
    async with worker(redis_db, engine=engine, max_running=3) as running, patient(redis_db, mode=mode) as source:
        jobs = await busy(broker, running)
        published = asyncio.create_task(publish(source, 1))
        await engine.loading.wait()
        try:
            yield running, engine, jobs
        finally:
            engine.load.set()
            assert (await published).state == "committed"
        await eventually(lambda: running.worker._generation.running == len(jobs))
        engine.tokens_per_s = 1e9
        engine.abort_all()
        await all_done(broker, jobs)
        assert (running.worker._generation.version, engine.starts) == (1, 1)


@pytest.mark.parametrize("what", ["abort", "pause and resume", "two aborts at once"])
async def test_nothing_starts_during_a_commit_though_an_interruption_ends_in_it(
    what: str, redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with committing(redis_db, broker, "resume") as (running, engine, _):
        assert running.worker._generation.running == 0
        if what == "abort":
            (await control.abort(drop=False)).check()
        elif what == "two aborts at once":
            for answers in await asyncio.gather(control.abort(drop=False), control.abort(drop=False)):
                answers.check()
        else:
            (await control.pause("abort")).check()
            (await control.resume()).check()
        await all_that_can_happen_now()
        assert engine.started_while_loading == []
        assert running.worker._generation.running == 0


@pytest.mark.parametrize("what", ["abort", "pause abort", "pause retract", "pause in_place"])
async def test_a_pause_during_a_slow_commit_in_place_waits_and_the_engine_lives(
    what: str, redis_db: str, control: PoolControl, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs cannot end before the commit does: that says nothing about the engine."""
    monkeypatch.setattr(Generation.interrupt, "__defaults__", (0.0,))  # an engine has no time at all to obey
    async with committing(redis_db, broker, "in_place") as (running, engine, _):
        service, before = running.worker._service, running.worker._generation.running
        mode: Any = what.removeprefix("pause ")
        asked = asyncio.create_task(control.abort(drop=False) if what == "abort" else control.pause(mode))
        if what != "abort":
            await eventually(lambda: service.paused)
        else:
            await eventually(lambda: running.worker._commands._begun or asked.done())
        await all_that_can_happen_now()
        assert not running.worker._keeper.dead.is_set()
        assert running.worker._generation.running == before == 3
        assert not asked.done()
        engine.load.set()
        (await asked).check()
        (await control.resume()).check()
