"""Pauses and interruptions while weights are being changed: nothing starts, and no engine is taken for dead."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.engines.manual import all_that_can_happen_now
from support.peers.publishing import WEIGHTS, publish, publisher
from support.pools.commanded import all_done, busy, slow
from support.pools.pool import Running, eventually, worker

from rolloutmq.messages import Broker
from rolloutmq.messages.model.weights import UpdateMode
from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.in_flight import InFlight
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
    async with worker(redis_db, engine=engine, max_running=3) as running, publisher(redis_db, mode=mode) as source:
        jobs = await busy(broker, running)
        published = asyncio.create_task(publish(source, 1))
        await engine.loading.wait()
        try:
            yield running, engine, jobs
        finally:
            engine.load.set()
            assert (await published).state == "committed"
        await eventually(lambda: running.generation.running == len(jobs))
        engine.tokens_per_s = 1e9
        engine.abort_all()
        await all_done(broker, jobs)
        assert (running.generation.version, engine.starts) == (1, 1)


@pytest.mark.parametrize("what", ["abort", "pause and resume", "two aborts at once"])
async def test_nothing_starts_during_a_commit_though_an_interruption_ends_in_it(
    what: str, redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with committing(redis_db, broker, "resume") as (running, engine, _):
        assert running.generation.running == 0
        if what == "abort":
            (await control.abort(drop=False)).check()
        elif what == "two aborts at once":
            for answers in await asyncio.gather(control.abort(drop=False), control.abort(drop=False)):
                answers.check()
        else:
            (await control.pause("interrupt")).check()
            (await control.resume()).check()
        await all_that_can_happen_now()
        assert engine.started_while_loading == []
        assert running.generation.running == 0


@pytest.mark.parametrize("what", ["abort", "pause interrupt", "pause retract", "pause in_place"])
async def test_a_pause_during_a_slow_commit_in_place_waits_and_the_engine_lives(
    what: str, redis_db: str, control: PoolControl, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs cannot end before the commit does: that says nothing about the engine."""
    monkeypatch.setattr(InFlight.interrupt, "__defaults__", (0.0,))  # an engine has no time at all to obey
    async with committing(redis_db, broker, "in_place") as (running, engine, _):
        state, before = running.generation.state, running.generation.running
        mode: Any = what.removeprefix("pause ")
        asked = asyncio.create_task(control.abort(drop=False) if what == "abort" else control.pause(mode))
        if what != "abort":
            await eventually(lambda: state.paused)
        else:
            await eventually(lambda: running.worker._commands._begun or asked.done())
        await all_that_can_happen_now()
        assert not running.generation.state.dead.is_set()
        assert running.generation.running == before == 3
        assert not asked.done()
        engine.load.set()
        (await asked).check()
        (await control.resume()).check()


# --- several holders at once, and a turn that has to be waited for ---------------------------------------------------


async def test_a_restart_lets_go_of_what_the_dead_engine_was_held_for_and_of_nothing_else(
    redis_db: str, control: PoolControl, broker: Broker
) -> None:
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        gate, state = running.generation.gate, running.generation.state
        somebody = gate.holder("somebody")
        somebody.acquire()
        (await control.pause("interrupt")).check()
        (await control.sleep()).check()
        state.broken(patient=True)
        assert gate.reasons == ["asleep", "pause", "quarantine", "somebody"]
        assert state.weights.reasons == ["asleep"]
        running.engine.kill()
        await eventually(lambda: running.engine.starts == 2 and not running.generation.state.dead.is_set())
        await eventually(lambda: gate.reasons == ["pause", "somebody"])
        assert state.weights.is_open
        (await control.resume()).check()
        (await control.resume()).check()
        assert gate.reasons == ["somebody"]
        somebody.release()
        await all_done(broker, jobs)
        assert running.engine.starts == 2


@pytest.mark.parametrize("action", ["flush_cache", "sleep", "wake"])
async def test_what_is_allowed_is_decided_when_the_turn_has_come(
    action: str, redis_db: str, control: PoolControl, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen engine answers no abort, and would be taken for dead: it was frozen while the command waited."""
    monkeypatch.setattr(InFlight.interrupt, "__defaults__", (0.0,))
    async with worker(redis_db, engine=slow(), max_running=3) as running:
        jobs = await busy(broker, running)
        state = running.generation.state
        if action == "wake":
            (await control.sleep(["cuda_graph"])).check()
        async with state.turn.take("a test"):
            pausing = asyncio.create_task(control.pause("in_place" if action != "wake" else "interrupt"))
            await eventually(lambda: state.paused)
            asked = asyncio.create_task(getattr(control, action)())
            await eventually(lambda: len(running.worker._commands._begun) == (1 if action == "wake" else 2))
            await all_that_can_happen_now()
            assert not asked.done()
        (await pausing).check()
        answer = (await asked)[running.id]
        assert answer.ok == (action == "wake")
        assert action == "wake" or "the engine is paused in place" in answer.error
        (await control.resume()).check()
        await all_done(broker, jobs)
        assert running.engine.starts == 1


async def test_a_transfer_that_waited_for_its_turn_leaves_an_engine_alone_that_sleeps_by_then(redis_db: str) -> None:
    prepared: list[int] = []

    class Noting(ScriptedEngine):
        async def prepare_weights(self, order: TransferOrder) -> TransferReport:
            prepared.append(order.version)
            return await super().prepare_weights(order)

    async with worker(redis_db, engine=Noting()) as running, publisher(redis_db) as source:
        state = running.generation.state
        asleep = state.weights.holder("asleep")
        async with state.turn.take("sleep"):
            handle = source.publish(1, WEIGHTS.items())
            await eventually(lambda: state.turn._lock._waiters)
            asleep.acquire()
        await eventually(lambda: not state.turn.locked())
        await all_that_can_happen_now()
        assert (prepared, state.version) == ([], 0)
        asleep.release()
        assert (await asyncio.to_thread(handle.wait, 60)).state == "committed"
        assert prepared == [1]
