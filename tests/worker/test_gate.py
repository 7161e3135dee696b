"""Gates with several holders: nothing starts while anybody holds one, and nobody lets go for somebody else."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.manual import Bench, all_that_can_happen_now
from support.pools.pool import eventually

from rolloutmq.messages.errors import EngineDead, EngineError
from rolloutmq.messages.model.jobs import GenerateJob
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.gate import Gate, WeightsTurn
from rolloutmq.worker.jobs.sample import SampleRun


def test_a_gate_opens_when_its_last_holder_lets_go_and_one_holder_holds_once() -> None:
    changes: list[bool] = []
    gate = Gate(lambda: changes.append(gate.is_open))
    one, other = gate.holder("pause"), gate.holder("pause")
    assert gate.is_open
    for holder in (one, one, other):
        holder.acquire()
    assert (gate.reasons, changes) == (["pause", "pause"], [False, False])
    one.release()
    one.release()
    assert (gate.reasons, other.holds, one.holds, changes) == (["pause"], True, False, [False, False, False])
    with pytest.raises(KeyError), other:
        raise KeyError
    assert gate.is_open
    assert changes == [False, False, False, True]


async def test_who_waits_for_a_gate_waits_for_all_of_its_holders() -> None:
    gate = Gate()
    await gate.opened()
    one, other = gate.holder("a"), gate.holder("b")
    one.acquire()
    waiting = asyncio.create_task(gate.opened())
    await all_that_can_happen_now()
    one.release()
    other.acquire()  # before the one that waits has seen it open
    await all_that_can_happen_now()
    assert not waiting.done()
    other.release()
    await waiting


async def test_one_at_a_time_has_the_turn_and_who_waits_in_vain_is_told_whose_it_is() -> None:
    turn = WeightsTurn()
    async with turn.take("a weight transfer"):
        with pytest.raises(EngineError, match="sleep: a weight transfer is under way, and did not end in time"):
            async with turn.take("sleep", time.monotonic()):
                pytest.fail("two have the turn")
        waiting = asyncio.create_task(turn.take("audit").__aenter__())
        await all_that_can_happen_now()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert turn.locked()
    assert not turn.locked()
    with pytest.raises(KeyError):
        async with turn.take("load"):
            raise KeyError
    assert not turn.locked()


async def test_nothing_starts_before_the_last_of_several_quiet_blocks_is_left() -> None:
    bench = Bench()
    await bench.run(2)
    async with bench.generation.in_flight.quiet():
        with pytest.raises(KeyError):
            async with bench.generation.in_flight.quiet():
                raise KeyError
        await all_that_can_happen_now()
        assert (bench.generation.running, len(bench.engine.requests)) == (0, 2)
    await eventually(lambda: len(bench.engine.requests) == 4)


async def test_an_engine_that_cannot_be_interrupted_leaves_the_gate_to_the_other_holders() -> None:
    bench = Bench()
    await bench.run(1)
    bench.engine.abort_all = lambda: None  # type: ignore[method-assign]
    pause = bench.generation.gate.holder("pause")
    pause.acquire()
    assert not await bench.generation.in_flight.interrupt(0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(bench.generation.in_flight).interrupt, "__defaults__", (0.0,))
        with pytest.raises(EngineDead, match="interrupted"):
            async with bench.generation.in_flight.quiet():
                pytest.fail("it is not quiet")
    assert (bench.deaths, bench.generation.gate.reasons) == (1, ["pause"])


class Crowd:
    """Holders, quiet blocks and switches that come and go as they like, and what must be true meanwhile."""

    def __init__(self) -> None:
        self.bench = Bench(slots=3)
        self.generation, self.engine = self.bench.generation, self.bench.engine
        self.holders = [self.generation.gate.holder(reason) for reason in ("pause", "pause", "asleep", "quarantine")]
        self.blocks: list[tuple[asyncio.Task[None], asyncio.Event, asyncio.Event]] = []  # task, entered, leave
        self.switch: tuple[asyncio.Task[None], asyncio.Event] | None = None
        self.outcome = ""
        self.added = 0

    def add(self) -> None:
        self.added += 1
        job = GenerateJob(token_ids=[1, 2], sampling=SamplingParams(max_new_tokens=100))
        self.generation.add([SampleRun(job, np.array([1, 2], np.int32), 0, 1, 0.0)])

    def end(self) -> None:
        for request_id, end in self.engine.ends.items():
            if not end.done():
                self.engine.end(request_id, 10)
                return

    def enter(self) -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def block() -> None:
            async with self.generation.in_flight.quiet():
                entered.set()
                await leave.wait()

        self.blocks.append((asyncio.create_task(block()), entered, leave))

    def begin_switch(self) -> None:
        if self.switch is not None:
            return
        leave = asyncio.Event()

        async def block() -> None:
            async with self.generation.in_flight.switching():
                await leave.wait()
                if self.outcome == "raises":
                    raise EngineDead("gone")
                if self.outcome == "switched":
                    ids = [request_id for request_id, end in self.engine.ends.items() if not end.done()]
                    self.bench.switched(self.generation.version + 1, dict.fromkeys(ids, 0))

        self.switch = asyncio.create_task(block()), leave

    async def end_switch(self, outcome: str) -> None:
        if self.switch is not None:
            self.outcome = outcome
            task, leave = self.switch
            self.switch = None
            leave.set()
            with suppress(EngineDead):
                await task

    async def do(self, what: str, number: int) -> None:
        if what == "hold":
            self.holders[number].acquire()
        elif what == "release":
            self.holders[number].release()
        elif what in ("leave", "cancel") and self.blocks:
            task, entered, leave = self.blocks.pop(number % len(self.blocks))
            if what == "cancel" or not entered.is_set():
                task.cancel()
            leave.set()
            with suppress(asyncio.CancelledError):
                await task
        elif what in ("switched", "nothing", "raises"):
            await self.end_switch(what)
        elif what in ("add", "end", "enter", "begin_switch"):
            getattr(self, what)()
        await all_that_can_happen_now()

    def reasons(self) -> list[str]:
        """Why the gate must be shut."""
        held = [holder.reason for holder in self.holders if holder.holds]
        return sorted([*held, *["quiet"] * len(self.blocks), *["switch"] * (self.switch is not None)])

    async def check(self, what: str, number: int) -> None:
        before, asked = self.reasons(), len(self.engine.requests)
        over = len(self.bench.finished) + len(self.generation.died_with)
        switching = self.switch is not None
        await self.do(what, number)
        assert self.generation.gate.reasons == self.reasons()
        if before and self.reasons():
            assert len(self.engine.requests) == asked
        if any(entered.is_set() for _, entered, _ in self.blocks):
            assert self.generation.running == 0
        if switching and self.switch is not None:
            assert len(self.bench.finished) + len(self.generation.died_with) == over

    async def leave(self) -> None:
        """All let go, and all that was added ends once."""
        await self.end_switch("nothing")
        while self.blocks:
            await self.do("leave", 0)
        for holder in self.holders:
            holder.release()
        await all_that_can_happen_now()
        while len(self.bench.finished) + len(self.generation.died_with) < self.added:
            assert self.generation.running
            self.end()
            await all_that_can_happen_now()
        assert len({id(sample) for sample in self.bench.finished + self.generation.died_with}) == self.added
        for sample in self.bench.finished:
            versions = [segment.version for segment in sample.segments]
            assert versions == sorted(versions)


ACTS = ("add", "end", "hold", "release", "enter", "leave", "cancel", "begin_switch", "switched", "nothing", "raises")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 3)), max_size=40))
def test_whatever_holders_do_nothing_starts_while_one_holds_and_all_ends_when_none_does(
    acts: list[tuple[str, int]],
) -> None:
    async def scene() -> None:
        crowd = Crowd()
        for what, number in (("add", 0), ("add", 0), *acts):
            await crowd.check(what, number)
        await crowd.leave()

    asyncio.run(scene())
