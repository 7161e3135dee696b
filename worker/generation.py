"""Runs samples on the engine leg by leg, until each is finished, refused, failed, or lost with the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from ..messages.errors import EngineDead, EngineError, RequestRefused
from .engine import Engine, EngineRequest, TaskRequest
from .engine_state import EngineState
from .in_flight import InFlight
from .jobs import Leg, Run, SampleRun
from .slots import Slots
from .updates import UpdateBudget

log = logging.getLogger(__name__)
TAKE_OUT_S = 2.0
CROWD = 150
"""With so many samples at once a step of an engine takes twice as long as with one. On an H200 one sample of a 4B model
gets 263, 249, 227, 195, 149 and 102 tokens/s at 8, 16, 32, 64, 128 and 256 at once: 3.6 ms and 0.024 ms for each."""
PACED_TOKENS = 8
"""Shorter legs say nothing of an engine's speed,"""
NEWEST = 0.05
"""and the newest of the others counts for so much."""


class Generation:
    """Runs samples on one engine, at most `most` at once.

    state: what the engine is; version: its, under which the next legs run. pace: tokens a second of one sample if it
    ran alone, and mean_tokens: of an ended sample, both 0 if not known. slots: what waits, and the gate. in_flight:
    what runs.
    prompt_tokens, cached_tokens: of requests that generate; the second had their keys and values in the cache.
    errors: what requests ended with: refused, failed, dead. busy_since: when a request last began or ended, while some
    run; else 0.
    updates: what those of the weights cost, and when the next one may begin.
    on_finished(sample), on_refused(sample, error), on_failed(sample, error): what became of a sample. One that failed
    may succeed on another worker; without an error it wants a version that this engine does not have. on_dead(): the
    engine died; `died_with` has the samples that were in it, until `clear`.
    """

    def __init__(
        self,
        engine: Engine,
        most: int,
        *,
        on_finished: Callable[[Run], None],
        on_refused: Callable[[Run, RequestRefused], None],
        on_failed: Callable[[Run, EngineError | None], None],
        on_dead: Callable[[], None],
    ) -> None:
        self.generated_tokens = self.finished = self.prompt_tokens = self.cached_tokens = 0
        self.errors: Counter[str] = Counter(refused=0, failed=0, dead=0)
        self.busy_since = 0.0
        self.pace = self.mean_tokens = 0.0
        self.died_with: list[Run] = []
        self._engine = engine
        self._on_finished, self._on_refused = on_finished, on_refused
        self._on_failed, self._on_dead = on_failed, on_dead
        self.slots = Slots(most, self._start)
        self.gate = self.slots.gate
        self.state = EngineState(self.gate)
        self.in_flight = InFlight(engine, self.gate, on_dead)
        self.updates = UpdateBudget(engine, self.slots, self.in_flight)

    @property
    def version(self) -> int:
        return self.state.version

    @property
    def running(self) -> int:
        """Samples in the engine."""
        return len(self.in_flight.running)

    def add(self, samples: Iterable[Run], *, end: bool = False) -> None:
        """Queue samples; they start as slots become free. end: finish them at once with what they have."""
        added = list(samples)
        self.slots.waiting.extend(added)
        if end:
            self.end(added)
        self.slots.fill()

    def end(self, samples: Iterable[Run]) -> None:
        """Finish these with what they have, as "abort": those that wait now, those in the engine when it lets go.

        What generates nothing has nothing to end with, and goes on.
        """
        for sample in samples:
            sample.ending = isinstance(sample, SampleRun)
        waiting = self.slots.waiting
        self.slots.waiting = deque(one for one in waiting if not (one.ending or one.dropped))
        for sample in waiting:
            if sample.ending and not sample.dropped:  # `_finish` may drop those behind it, of the same job
                self._finish(sample)
        self.in_flight.abort_dropped()

    async def take_out(self, samples: Collection[Run]) -> list[Run]:
        """Interrupt these samples, and keep them from running on until `put_back`. Returns those that wait then."""
        for sample in samples:
            sample.moving = True
        await self.in_flight.take_out(samples, TAKE_OUT_S)
        return [one for one in self.slots.waiting if one.moving]

    def put_back(self, samples: Iterable[Run]) -> None:
        """Let samples that were taken out, and are still this worker's, run on."""
        for sample in samples:
            sample.moving = False
        self.slots.fill()

    def clear(self) -> None:
        """Forget every sample that is not in the engine."""
        self.slots.waiting.clear()
        self.died_with.clear()

    def _start(self, sample: Run) -> asyncio.Task[None] | None:
        if sample.job.exact_version not in (None, self.version):
            self._on_failed(sample, None)
            return None
        # In flight before its task first runs: whoever holds the gate from now on must see that it runs.
        request = sample.next_request(self.version)
        self.in_flight.add(request.request_id, sample)
        self.busy_since = time.monotonic()
        return asyncio.create_task(self._run(sample, request))

    async def _run(self, sample: Run, request: EngineRequest | TaskRequest) -> None:
        began, leg, beside = time.monotonic(), sample.leg, self.running
        assert leg is not None
        try:
            try:
                output = await self._ask(request)
                seconds = time.monotonic() - began
                await self.in_flight.outputs.opened()  # until then nobody can say which version sampled what
            finally:
                self.in_flight.remove(request.request_id)
                self.busy_since = time.monotonic() if self.running else 0.0
            if leg.spoiled:
                raise EngineDead("weights that are no version were under it")
            if isinstance(request, EngineRequest):
                self.prompt_tokens += len(request.token_ids)
                self.cached_tokens += output.cached_tokens
            self._take_in(sample, leg, output, seconds, beside)
        except EngineDead:
            self.errors["dead"] += 1
            if sample.ending and not sample.dropped:
                self._finish(sample)
            else:
                self.died_with.append(sample)
            self._on_dead()
        except RequestRefused as error:
            self.errors["refused"] += 1
            self._on_refused(sample, error)
        except EngineError as error:
            self.errors["failed"] += 1
            if sample.ending and not sample.dropped:
                self._finish(sample)
            elif not self.slots.try_again(sample, error):
                self._on_failed(sample, error)
        except Exception as error:
            self._fail_unexpectedly(sample, error)

    def _ask(self, request: EngineRequest | TaskRequest) -> Awaitable[Any]:
        return self._engine.generate(request) if isinstance(request, EngineRequest) else self._engine.perform(request)

    def _fail_unexpectedly(self, sample: Run, error: Exception) -> None:
        # Otherwise the worker would hold its job for ever: nobody would generate or publish it any more.
        log.error("a sample failed in a way nobody expected", exc_info=error)
        self._on_refused(sample, RequestRefused(f"unexpected {type(error).__name__}: {error}"))

    def _take_in(self, sample: Run, leg: Leg, output: Any, seconds: float, beside: int) -> None:
        sample.absorb(leg, output, seconds)
        tokens = len(output.token_ids) if isinstance(sample, SampleRun) else 0
        self.generated_tokens += tokens
        if tokens >= PACED_TOKENS and seconds > 0:
            # Many may have begun or ended at once with it, as after an update.
            pace = tokens / seconds * (1 + max(beside, self.running) / CROWD)
            self.pace += (pace - self.pace) * (NEWEST if self.pace else 1.0)
        if sample.traces is not None:
            sample.traces.leg(sample.job.id, sample.index, leg.version, seconds, tokens)
        if sample.dropped:
            return
        if sample.finish_reason is None and not sample.ending:
            self.slots.waiting.appendleft(sample)
        else:
            self._finish(sample)

    def _finish(self, sample: Run) -> None:
        sample.finish_reason = sample.finish_reason or "abort"
        self.finished += 1
        if isinstance(sample, SampleRun):
            self.mean_tokens += (len(sample.tokens) - self.mean_tokens) * max(NEWEST, 1 / self.finished)
        try:
            self._on_finished(sample)
        except Exception as error:  # its text, its size: only this job ends, not the worker that was told to end it
            self._fail_unexpectedly(sample, error)
