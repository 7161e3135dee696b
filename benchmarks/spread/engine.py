"""Engines for `benchmarks/spread/pool.py`: they generate nothing, and their steps take as long as measured ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rolloutmq.worker.engine import EngineInfo, EngineOutput, EngineRequest, Generated, LoadedAdapters

from .load import PROMPT, Case, step_of

TOKENS, LOGPROBS = np.zeros(1 << 16, np.int32), np.zeros(1 << 16, np.float32)
INFO = EngineInfo(
    name="simulated",
    version="1",
    model="simulated",
    dtype="bfloat16",
    device="none",
    vocab_size=50_000,
    context_length=32_768,
    features=frozenset(),
    adapters=LoadedAdapters(),
)


class Clock:
    """Simulated time: it runs `stretch` times as slowly as real time. One timer serves all engines.

    What a timer does too late still happens at its own time: an engine's next samples end as if it had been in time.
    """

    def __init__(self, stretch: float) -> None:
        self.stretch, self._began = stretch, time.monotonic()
        self._due: list[tuple[float, int, SimulatedEngine, int]] = []
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.late_s = 0.0

    def begin(self) -> float:
        """It is 0 now. Returns when that is by the real clock."""
        self._began = time.monotonic()
        return self._began

    def now(self) -> float:
        return (time.monotonic() - self._began) / self.stretch

    async def until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.now()) * self.stretch)

    def ends_at(self, at: float, engine: SimulatedEngine) -> None:
        """The engine's next sample ends then, unless something changes before."""
        heapq.heappush(self._due, (at, next(self._numbers), engine, engine.changed))
        if self._timer is None or at < self._timer_at:
            self._set()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        while self._due and self._due[0][2].changed != self._due[0][3]:
            heapq.heappop(self._due)
        if self._due:
            self._timer_at = self._due[0][0]
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._began + self._timer_at * self.stretch, self._happen)

    def _happen(self) -> None:
        now = self.now()
        while self._due and self._due[0][0] <= now:
            at, _, engine, changed = heapq.heappop(self._due)
            if engine.changed == changed:
                self.late_s = max(self.late_s, now - at)
                engine.end_next(at)
        self._set()


class SimulatedEngine:
    """All of its requests get a token in each step, and a prefill holds all of them up.

    lengths: tokens of each job's samples. running: by request id, the future, and the steps at which it began and will
    end.
    """

    def __init__(self, clock: Clock, case: Case, lengths: Mapping[str, Sequence[int]]) -> None:
        self.info, self.changed = INFO, 0
        self._clock, self._lengths, self._step = clock, lengths, step_of(case.curve)
        self._prefill_s = self._step(1) / case.prefills
        self._at = self._steps = self._debt_s = 0.0
        self._running: dict[str, tuple[asyncio.Future[EngineOutput], float, float]] = {}
        self._ends: list[tuple[float, str]] = []
        self._jobs: set[str] = set()  # whose prompts it has read

    async def generate(self, request: EngineRequest) -> EngineOutput:
        self._advance(self._clock.now())
        job, index = request.request_id[:32], int(request.request_id[32:36], 16)
        read = request.generated + (1 if job in self._jobs else PROMPT)
        self._jobs.add(job)
        self._debt_s += read * self._prefill_s
        end = self._steps + self._lengths[job][index] - request.generated
        future = asyncio.get_running_loop().create_future()
        self._running[request.request_id] = future, self._steps, end
        heapq.heappush(self._ends, (end, request.request_id))
        self._change()
        return await future

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        if request_id not in self._running:
            return None
        self._advance(self._clock.now())
        tokens = slice(start, int(self._steps - self._running[request_id][1]))
        return Generated(TOKENS[tokens], LOGPROBS[tokens])

    def abort(self, request_id: str) -> None:
        if request_id in self._running:
            self._advance(self._clock.now())
            future, began, _ = self._running.pop(request_id)
            self._answer(future, int(self._steps - began), "abort")
            self._change()

    def abort_all(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)

    def stop(self) -> None:
        """It is dead: what it generated is lost, and nobody hears of it."""
        for future, _, _ in self._running.values():
            future.cancel()
        self._running.clear()
        self._change()

    def end_next(self, at: float) -> None:
        """What runs shortest has all of its tokens at this time."""
        self._advance(at)
        end, request_id = heapq.heappop(self._ends)
        future, began, _ = self._running.pop(request_id)
        self._steps = end
        self._answer(future, round(end - began), "stop")
        self._change()

    @staticmethod
    def _answer(future: asyncio.Future[EngineOutput], count: int, reason: Any) -> None:
        if not future.done():
            future.set_result(EngineOutput(TOKENS[:count], LOGPROBS[:count], reason))

    def _advance(self, now: float) -> None:
        seconds, self._at = max(0.0, now - self._at), max(now, self._at)
        paid = min(self._debt_s, seconds)
        self._debt_s -= paid
        if self._running:
            self._steps += (seconds - paid) / self._step(len(self._running))

    def _change(self) -> None:
        self.changed += 1
        while self._ends and self._ends[0][1] not in self._running:
            heapq.heappop(self._ends)
        if self._ends:
            left = max(0.0, self._ends[0][0] - self._steps) * self._step(len(self._running))
            self._clock.ends_at(self._at + self._debt_s + left, self)
