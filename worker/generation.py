"""Keeps the engine full: samples wait here for a slot, run leg by leg, stop and go on around weight updates."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from ..messages.errors import EngineDead, EngineError, RequestRefused
from .engine import Engine, EngineOutput, EngineRequest, TaskOutput, TaskRequest
from .gate import Gate, set_within
from .jobs import Leg, Run, SampleRun

log = logging.getLogger(__name__)
INTERRUPT_S = 15.0
"""An engine that has not ended its requests so long after it was told to counts as dead."""
ABORT_AGAIN_S = 0.1
"""An abort misses a request that is still on its way into the scheduler: it is repeated until the engine is idle."""
OF_A_SAMPLE = 40
"""Digits of a request id that are the same for all legs of a sample in this attempt."""
RETRIES_S = (0.5, 1.0, 2.0)
"""A sample that failed for want of memory is tried again this often, each time after so many seconds."""
GROW_S = 30.0
"""After so long without another such failure an eighth of the full number of slots is added again."""
_MEMORY = re.compile(
    r"out of memory|outofmemory|can't allocate memory|cannot allocate memory|bad_alloc|no available memory"
    r"|not enough memory|kv cache pool is full|memory pressure|memoryerror",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine's error says that the memory of a GPU, the host or the KV cache was not enough."""
    return _MEMORY.search(f"{type(error).__name__}: {error}") is not None


class Pressure:
    """How many of `most` slots are used: half as many after the engine ran out of memory, more again with time."""

    def __init__(self, most: int) -> None:
        self.most = self.slots = most
        self._changed = 0.0

    def relieve(self) -> None:
        """Use half as many slots from now on."""
        self.slots = max(1, self.slots // 2)
        self._changed = time.monotonic()

    def grow(self) -> None:
        """Called now and then: use a few more if the last change was long ago."""
        if self.slots < self.most and time.monotonic() - self._changed > GROW_S:
            self.slots = min(self.most, self.slots + max(1, self.most // 8))
            self._changed = time.monotonic()


class Generation:
    """Runs samples on one engine, at most `slots` at once.

    gate: whoever holds it keeps every leg from starting.
    on_finished(sample), on_refused(sample, error), on_failed(sample, error): what became of a sample. One that failed
    may succeed on another worker. on_dead(): the engine died; `died_with` has the samples that were in it, until
    `clear`.
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
        self.gate = Gate(self._start_what_may)
        self._outputs = Gate()  # held while weights are switched: no leg's output is taken in
        self._recovery = self.gate.holder("memory")

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
        """Queue samples; they start as slots become free. end: finish them at once with what they have."""
        added = list(samples)
        self._waiting.extend(added)
        if end:
            self.end(added)
        self._start_what_may()

    def grow(self) -> None:
        """Called now and then: see `Pressure.grow`."""
        self.pressure.grow()
        self._start_what_may()

    def _start_what_may(self) -> None:
        """The one place that decides which samples start: called after each change of gate, slots, queue and legs."""
        while self._waiting and self.gate.is_open and len(self._tasks) < self.pressure.slots:
            sample = self._waiting.popleft()
            if sample.dropped:
                continue
            # Registered before its task first runs: whoever holds the gate from now on must see that it runs.
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
        self._start_what_may()

    def _fail_unexpectedly(self, sample: Run, error: BaseException) -> None:
        # Otherwise the worker would hold its job for ever: nobody would generate or publish it any more.
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
            await self._outputs.opened()  # until then nobody can say which version sampled what
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
        except Exception as error:  # its text, its size: only this job ends, not the worker that was told to end it
            self._fail_unexpectedly(sample, error)

    def _try_again(self, sample: Run, request_id: str, error: EngineError) -> bool:
        """Queue it again after want of memory, for after a pause beside half as many. False after too many tries."""
        key = request_id[:OF_A_SAMPLE]
        tries = self._tries.pop(key, 0)
        if tries >= len(RETRIES_S) or not is_out_of_memory(error):
            return False
        self._tries[key] = tries + 1
        self._waiting.appendleft(sample)
        if not self._recovery.holds:  # all that ran together may say the same
            self.pressure.relieve()
            self._recovery.acquire()
            asyncio.get_running_loop().call_later(RETRIES_S[tries], self._recovery.release)
            log.warning("out of memory, %d samples at once from now on: %s", self.pressure.slots, error)
        return True

    def _lost(self, sample: Run) -> None:
        self.died_with.append(sample)
        self._on_dead()

    # --- stopping and going on -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """The engine runs nothing inside this block: what runs is interrupted, keeps what it has, and goes on after.

        Several blocks may overlap: legs start when the last one has been left. Raises EngineDead, and calls on_dead,
        if the engine cannot be interrupted.
        """
        with self.gate.holder("quiet"):
            if not await self.interrupt():
                self._on_dead()
                raise EngineDead(f"what runs could not be interrupted within {INTERRUPT_S:g} s")
            yield

    @asynccontextmanager
    async def switching(self) -> AsyncIterator[None]:
        """Weights may change inside this block while samples run.

        Nothing starts and nothing ends in it: a leg whose output comes meanwhile waits, still counts as running, and
        offers nothing to be saved. The caller says inside what became of the weights: `switched`, or `spoiled` if they
        are neither old nor new. Without either they are the old ones. An exception counts as `spoiled`. Every leg's
        request is on its way into the engine before the block begins, so the engine knows it at the switch.
        """
        with self.gate.holder("switch"), self._outputs.holder("switch"):
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

    def switched(self, version: int, counts: Mapping[str, int]) -> None:
        """The weights are `version` now. Raises RuntimeError outside `switching`.

        counts: by request id, how many tokens the older weights sampled, for every request in the engine at the switch.
        A leg that is not among them had ended before: the older weights sampled all of it.
        """
        if self._outputs.is_open:
            raise RuntimeError("weights can only be switched inside `switching`")
        for leg in self._legs():
            if (count := counts.get(leg.request_id)) is not None:
                leg.switch(version, count)
        self.version = version

    def spoiled(self) -> None:
        """What runs may have tokens that no version sampled: it is thrown away, as if the engine had died with it."""
        for leg in self._legs():
            leg.spoiled = True

    def _legs(self) -> list[Leg]:
        return [sample.leg for sample in self._running.values() if sample.leg is not None]

    async def idle(self, timeout_s: float) -> bool:
        """Let what is in the engine run to its end; False if that took longer. The caller holds the gate."""
        return await set_within(self._idle, timeout_s)

    async def interrupt(self, timeout_s: float = INTERRUPT_S) -> bool:
        """Stop everything that runs; the samples wait here with what they have. The caller holds the gate.

        False if the engine took longer than `timeout_s`: it is stuck. Time in which weights are switched does not
        count, because no leg can end then.
        """
        while self._running:
            await self._outputs.opened()
            began = time.monotonic()
            self._engine.abort_all()
            await set_within(self._idle, ABORT_AGAIN_S)
            if self._outputs.is_open and (timeout_s := timeout_s - (time.monotonic() - began)) <= 0:
                return not self._running
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
