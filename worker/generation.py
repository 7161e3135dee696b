"""Keeps the engine full: samples wait here for a slot, run leg by leg, and stop and go on around weight updates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from ..messages.errors import EngineDead, EngineError, RequestRefused
from .engine import Engine, EngineRequest
from .legs import Leg
from .samples import SampleRun

log = logging.getLogger(__name__)
INTERRUPT_S = 15.0
ABORT_AGAIN_S = 0.1
"""A request on its way into the scheduler is not there yet to be aborted: ask again until the engine is idle."""


class Generation:
    """Runs samples on one engine, at most `slots` at once.

    on_finished(sample), on_refused(sample, error), on_failed(sample, error): what becomes of a sample; another worker
    may do better with one that failed. on_dead(): the engine died; the samples
    that were in it are in `died_with` until `clear`.
    """

    def __init__(
        self,
        engine: Engine,
        slots: int,
        *,
        on_finished: Callable[[SampleRun], None],
        on_refused: Callable[[SampleRun, RequestRefused], None],
        on_failed: Callable[[SampleRun, EngineError], None],
        on_dead: Callable[[], None],
    ) -> None:
        self.version = 0
        self.generated_tokens = 0
        self.finished = 0
        self._engine = engine
        self._slots = slots
        self._on_finished, self._on_refused = on_finished, on_refused
        self._on_failed, self._on_dead = on_failed, on_dead
        self.died_with: list[SampleRun] = []
        self._waiting: deque[SampleRun] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, SampleRun] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed_by: set[str] = set()
        self._settled = asyncio.Event()  # no switch is under way
        self._settled.set()

    # --- what is here ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Samples in the engine."""
        return len(self._running)

    def in_engine(self, samples: Iterable[SampleRun]) -> bool:
        """Whether any of these is in the engine now."""
        return any(sample.leg is not None for sample in samples)

    # --- work in ---------------------------------------------------------------------------------------------------

    def add(self, samples: Iterable[SampleRun]) -> None:
        """Queue samples; they start as slots get free."""
        self._waiting.extend(samples)
        self._pump()

    def _pump(self) -> None:
        while self._waiting and not self._closed_by and len(self._tasks) < self._slots:
            sample = self._waiting.popleft()
            if sample.dropped:
                continue
            # Registered before the task first runs: whoever closes the gate in between must see it.
            request = sample.next_request(self.version)
            self._running[request.request_id] = sample
            self._idle.clear()
            task = asyncio.create_task(self._run_leg(sample, request))
            self._tasks.add(task)
            task.add_done_callback(partial(self._leg_done, sample))

    def _leg_done(self, sample: SampleRun, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Held for ever otherwise: nobody would generate or publish it any more.
            log.error("a sample failed in a way nobody expected", exc_info=error)
            self._on_refused(sample, RequestRefused(f"unexpected {type(error).__name__}: {error}"))
        self._pump()

    async def _run_leg(self, sample: SampleRun, request: EngineRequest) -> None:
        began = time.monotonic()
        leg = sample.leg
        assert leg is not None
        try:
            output = await self._engine.generate(request)
            seconds = time.monotonic() - began
            await self._settled.wait()  # until then nobody can say which version sampled what
        except EngineDead:
            self._lost(sample)
            return
        except RequestRefused as error:
            self._on_refused(sample, error)
            return
        except EngineError as error:
            self._on_failed(sample, error)
            return
        finally:
            sample.leg = None
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()
        if leg.spoiled:
            self._lost(sample)
            return
        sample.absorb(leg, output, seconds)
        self.generated_tokens += len(output.token_ids)
        if sample.dropped:
            return
        if sample.finish_reason is None:
            self._waiting.appendleft(sample)
        else:
            self.finished += 1
            self._on_finished(sample)

    def _lost(self, sample: SampleRun) -> None:
        self.died_with.append(sample)
        self._on_dead()

    # --- stopping and going on -------------------------------------------------------------------------------------

    def close_gate(self, reason: str) -> None:
        """Start nothing more until `open_gate` with the same reason; several reasons may hold it."""
        self._closed_by.add(reason)

    def open_gate(self, reason: str) -> None:
        self._closed_by.discard(reason)
        self._pump()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """The engine runs nothing inside this block: what runs is interrupted, keeps what it has, and goes on after.

        Raises EngineDead, and tells on_dead, if the engine cannot be interrupted.
        """
        self.close_gate("quiet")
        try:
            if not await self.interrupt():
                self._on_dead()
                raise EngineDead(f"what runs could not be interrupted within {INTERRUPT_S:g} s")
            yield
        finally:
            self.open_gate("quiet")

    @asynccontextmanager
    async def switching(self) -> AsyncIterator[None]:
        """Weights may change inside this block while samples run.

        Nothing starts and nothing ends in it: a leg whose output comes meanwhile waits, still counted as running, and
        offers nothing to be saved. Say inside what became of the weights: `switched`, or `spoiled` if they are neither
        old nor new; saying nothing means that they are the old ones. An exception counts as `spoiled`. Every leg's
        request is on its way into the engine before the block begins, so that the engine knows it at the switch.
        """
        self.close_gate("switch")
        self._settled.clear()
        try:
            await asyncio.sleep(0)  # legs whose task has not run yet hand over their requests
            for leg in self._legs():
                leg.held = True
            yield
        except BaseException:
            self.spoiled()
            raise
        finally:
            for leg in self._legs():
                leg.held = False
            self._settled.set()
            self.open_gate("switch")

    def switched(self, version: int, counts: Mapping[str, int]) -> None:
        """The weights are `version` now. Only inside `switching`.

        counts: by request id, how many tokens the older weights sampled, for every request in the engine at the switch.
        A leg that is not among them had ended before: all of it is older.
        """
        if self._settled.is_set():
            raise RuntimeError("weights can only be switched inside `switching`")
        for leg in self._legs():
            if (count := counts.get(leg.request_id)) is not None:
                leg.switch(version, count)
        self.version = version

    def spoiled(self) -> None:
        """What runs may hold tokens that no version sampled: it is thrown away, as if the engine had died with it."""
        for leg in self._legs():
            leg.spoiled = True

    def _legs(self) -> list[Leg]:
        return [sample.leg for sample in self._running.values() if sample.leg is not None]

    async def idle(self, timeout_s: float) -> bool:
        """Let what is in the engine run to its end; False if that took longer. Close the gate first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def interrupt(self, timeout_s: float = INTERRUPT_S) -> bool:
        """Stop everything that runs; the samples wait here with what they have. The gate must be closed.

        False if the engine did not answer in time: it is stuck.
        """
        deadline = time.monotonic() + timeout_s
        while self._running:
            if time.monotonic() >= deadline:
                return False
            self._engine.abort_all()
            try:
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._idle.wait()
            except TimeoutError:
                continue
        return True

    def abort_dropped(self) -> None:
        """Free the slots of samples nobody wants any more."""
        for request_id, sample in list(self._running.items()):
            if sample.dropped:
                self._engine.abort(request_id)

    def clear(self) -> None:
        """Forget every sample that is not in the engine."""
        self._waiting.clear()
        self.died_with.clear()
