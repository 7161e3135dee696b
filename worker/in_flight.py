"""What an update of the weights does to samples in flight: they end, are interrupted, or go on under new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress

from ..messages.errors import EngineDead
from .engine import Engine
from .gate import Gate, set_within
from .jobs import Leg, Run

INTERRUPT_S = 15.0
"""An engine that has not ended its requests so long after it was told to counts as dead."""
ABORT_AGAIN_S = 0.1
"""An abort misses a request that is still on its way into the scheduler: it is repeated until the engine is idle."""


class InFlight:
    """The samples in the engine, by request id.

    gate: while anybody holds it, no leg starts. outputs: while anybody holds it, no leg's output is taken in.
    on_dead(): the engine cannot be interrupted.
    """

    def __init__(self, engine: Engine, gate: Gate, on_dead: Callable[[], None]) -> None:
        self.running: dict[str, Run] = {}
        self.outputs = Gate()
        self._engine, self._gate, self._on_dead = engine, gate, on_dead
        self._ended = asyncio.Event()  # a leg has
        self._idle = asyncio.Event()
        self._idle.set()

    def add(self, request_id: str, sample: Run) -> None:
        """A leg starts."""
        self.running[request_id] = sample
        self._idle.clear()

    def remove(self, request_id: str) -> None:
        """A leg has ended."""
        self.running.pop(request_id).leg = None
        self._ended.set()
        if not self.running:
            self._idle.set()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """The engine runs nothing inside this block: what runs is interrupted, keeps what it has, and goes on after.

        Several blocks may overlap: legs start when the last one has been left. Raises EngineDead, and calls on_dead,
        if the engine cannot be interrupted.
        """
        with self._gate.holder("quiet"):
            if not await self.interrupt():
                self._on_dead()
                raise EngineDead(f"what runs could not be interrupted within {INTERRUPT_S:g} s")
            yield

    @asynccontextmanager
    async def switching(self) -> AsyncIterator[None]:
        """Weights may change inside this block while samples run.

        What wants exactly the old version is interrupted before. Then nothing starts and nothing ends: a leg whose
        output comes meanwhile waits, still counts as running, and offers nothing to be saved. The caller says inside
        what became of the weights: `switched`, or `spoiled` if they are neither old nor new. Without either they are
        the old ones. An exception counts as `spoiled`. Every leg's request is on its way into the engine before the
        block begins, so the engine knows it at the switch.
        """
        with self._gate.holder("switch"):
            exact = [sample for sample in self.running.values() if sample.job.exact_version is not None]
            await self.take_out(exact, INTERRUPT_S)
            if any(sample.leg is not None for sample in exact):
                self._on_dead()
                raise EngineDead(f"what runs could not be interrupted within {INTERRUPT_S:g} s")
            with self.outputs.holder("switch"):
                try:
                    await asyncio.sleep(0)  # legs whose task has not run yet hand over their requests
                    for leg in self._legs():
                        leg.switching = True
                    yield
                except BaseException:
                    self.spoiled()
                    raise
                finally:
                    for leg in self._legs():
                        leg.switching = False

    def switched(self, version: int, counts: Mapping[str, int], anew: Collection[str] = ()) -> None:
        """The weights are `version` now; the caller tells Generation too. Raises RuntimeError outside `switching`.

        counts: by request id, how many tokens the older weights sampled, for every request in the engine at the switch.
        A leg that is not among them had ended before: the older weights sampled all of it. anew: the legs of which the
        engine has no cache at the moment. The newer weights will compute it.
        """
        if self.outputs.is_open:
            raise RuntimeError("weights can only be switched inside `switching`")
        anew = frozenset(anew)
        for leg in self._legs():
            if (count := counts.get(leg.request_id)) is not None:
                leg.switch(version, count, anew=leg.request_id in anew)

    def spoiled(self) -> None:
        """What runs may have tokens that no version sampled: it is thrown away, as if the engine had died with it."""
        for leg in self._legs():
            leg.spoiled = True

    def _legs(self) -> list[Leg]:
        return [sample.leg for sample in self.running.values() if sample.leg is not None]

    async def idle(self, timeout_s: float) -> bool:
        """Let what is in the engine run to its end; False if that took longer. The caller holds the gate."""
        return await set_within(self._idle, timeout_s)

    async def interrupt(self, timeout_s: float = INTERRUPT_S) -> bool:
        """Stop everything that runs; the samples wait with what they have. The caller holds the gate.

        False if the engine took longer than `timeout_s`: it is stuck. Time in which weights are switched does not
        count, because no leg can end then.
        """
        while self.running:
            await self.outputs.opened()
            began = time.monotonic()
            self._engine.abort_all()
            await set_within(self._idle, ABORT_AGAIN_S)
            if self.outputs.is_open and (timeout_s := timeout_s - (time.monotonic() - began)) <= 0:
                return not self.running
        return True

    async def take_out(self, samples: Collection[Run], timeout_s: float) -> None:
        """Stop these samples, wherever they are in the engine, or give up after `timeout_s`.

        Nobody may start them meanwhile. Time in which weights are switched counts, too: a move can wait.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while running := [sample.leg for sample in samples if sample.leg is not None]:
                    for leg in running:
                        self._engine.abort(leg.request_id)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            while any(sample.leg is not None for sample in samples):
                                self._ended.clear()
                                await self._ended.wait()

    def abort_dropped(self) -> None:
        """Free the slots of samples nobody wants any more, or not longer than they are."""
        for request_id, sample in list(self.running.items()):
            if sample.dropped or sample.ending:
                self._engine.abort(request_id)
