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
from .engine import Engine, EngineOutput, EngineRequest, TaskOutput, TaskRequest
from .jobs import Leg, Run, SampleRun
from .pressure import RETRIES_S, Pressure, is_out_of_memory

log = logging.getLogger(__name__)
INTERRUPT_S = 15.0
ABORT_AGAIN_S = 0.1
"""A request on its way into the scheduler is not there yet to be aborted: ask again until the engine is idle."""
OF_A_SAMPLE = 40
"""Digits of a request id that are the same for all legs of a sample in this attempt."""


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
        on_finished: Callable[[Run], None],
        on_refused: Callable[[Run, RequestRefused], None],
        on_failed: Callable[[Run, EngineError], None],
        on_dead: Callable[[], None],
    ) -> None:
        self.version = 0
        self.generated_tokens = 0
        self.finished = 0
        self._engine = engine
        self.pressure = Pressure(slots)
        self._tries: dict[str, int] = {}
        self._on_finished, self._on_refused = on_finished, on_refused
        self._on_failed, self._on_dead = on_failed, on_dead
        self.died_with: list[Run] = []
        self._waiting: deque[Run] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, Run] = {}
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

    def in_engine(self, samples: Iterable[Run]) -> bool:
        """Whether any of these is in the engine now."""
        return any(sample.leg is not None for sample in samples)

    # --- work in ---------------------------------------------------------------------------------------------------

    def add(self, samples: Iterable[Run], *, end: bool = False) -> None:
        """Queue samples; they start as slots get free. end: finish them at once with what they have."""
        added = list(samples)
        self._waiting.extend(added)
        if end:
            self.end(added)
        self._pump()

    def _pump(self) -> None:
        while self._waiting and not self._closed_by and len(self._tasks) < self.pressure.slots:
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

    def _leg_done(self, sample: Run, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail_unexpectedly(sample, error)
        self._pump()

    def _fail_unexpectedly(self, sample: Run, error: BaseException) -> None:
        # Held for ever otherwise: nobody would generate or publish it any more.
        log.error("a sample failed in a way nobody expected", exc_info=error)
        self._on_refused(sample, RequestRefused(f"unexpected {type(error).__name__}: {error}"))

    async def _run_leg(self, sample: Run, request: EngineRequest | TaskRequest) -> None:
        began = time.monotonic()
        leg = sample.leg
        assert leg is not None
        try:
            if isinstance(request, EngineRequest):
                output: EngineOutput | TaskOutput = await self._engine.generate(request)
            else:
                output = await self._engine.perform(request)
            seconds = time.monotonic() - began
            await self._settled.wait()  # until then nobody can say which version sampled what
        except EngineDead:
            self._lost(sample)
            return
        except RequestRefused as error:
            self._on_refused(sample, error)
            return
        except EngineError as error:
            if not self._try_again(sample, request.request_id, error):
                self._on_failed(sample, error)
            return
        finally:
            sample.leg = None
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()
        if leg.spoiled:
            self._lost(sample)
        else:
            self._take_in(sample, leg, output, seconds)

    def _take_in(self, sample: Run, leg: Leg, output: EngineOutput | TaskOutput, seconds: float) -> None:
        if isinstance(sample, SampleRun):
            assert isinstance(output, EngineOutput)
            sample.absorb(leg, output, seconds)
            self.generated_tokens += len(output.token_ids)
        else:
            assert isinstance(output, TaskOutput)
            sample.absorb(leg, output, seconds)
        if sample.dropped:
            return
        if sample.finish_reason is None and sample.ending:
            self._end(sample)
        elif sample.finish_reason is None:
            self._waiting.appendleft(sample)
        else:
            self.finished += 1
            self._tries.pop(leg.request_id[:OF_A_SAMPLE], None)
            self._on_finished(sample)

    def _end(self, sample: Run) -> None:
        sample.finish_reason = "abort"
        self.finished += 1
        try:
            self._on_finished(sample)
        except Exception as error:  # its text, its size: it ends this job, and not the worker that was told to end it
            self._fail_unexpectedly(sample, error)

    def _try_again(self, sample: Run, request_id: str, error: EngineError) -> bool:
        """After a pause and with half as many beside it, if it was memory that was missing; not for ever."""
        key = request_id[:OF_A_SAMPLE]
        tries = self._tries.pop(key, 0)
        if tries >= len(RETRIES_S) or not is_out_of_memory(error):
            return False
        self._tries[key] = tries + 1
        self._waiting.appendleft(sample)
        if "memory" not in self._closed_by:  # all that ran together may say the same
            self.pressure.relieve()
            self.close_gate("memory")
            asyncio.get_running_loop().call_later(RETRIES_S[tries], self.open_gate, "memory")
            log.warning("out of memory, %d samples at once from now on: %s", self.pressure.slots, error)
        return True

    def _lost(self, sample: Run) -> None:
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

    def end(self, samples: Iterable[Run]) -> None:
        """Finish these with what they have, as "abort": those that wait now, those in the engine when it lets go."""
        for sample in samples:
            sample.ending = True
        ended = [one for one in self._waiting if one.ending and not one.dropped]
        self._waiting = deque(one for one in self._waiting if not (one.ending or one.dropped))
        for sample in ended:
            if not sample.dropped:  # with one before it, of the same job
                self._end(sample)
        self.abort_dropped()

    def abort_dropped(self) -> None:
        """Free the slots of samples nobody wants any more, or not longer than they are."""
        for request_id, sample in list(self._running.items()):
            if sample.dropped or sample.ending:
                self._engine.abort(request_id)

    def clear(self) -> None:
        """Forget every sample that is not in the engine."""
        self._waiting.clear()
        self._tries.clear()
        self.died_with.clear()
