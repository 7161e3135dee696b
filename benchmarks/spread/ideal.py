"""A balancer without latency that knows no lengths: what the pool in `benchmarks/spread` is compared with.

When a worker dies, its samples begin anew. Whether the longest ones are among them is chance, and decides when all has
ended. So the ideal loses the very samples that the measured run has lost, and hears of it when their lease ends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .load import PROMPT, ROOM, Case, Change, Lost, arrivals, changes, step_of


@dataclass(eq=False)
class Sample:
    length: int
    left: float = 0.0  # tokens, when it is nowhere
    end: float = 0.0  # by the count of its engine's steps
    engine: Engine | None = None


@dataclass(eq=False)
class Engine:
    """All of its samples get a token in each step. steps: since the start. debt: seconds of prefills that are due."""

    number: int
    at: float
    steps: float = 0.0
    debt: float = 0.0
    samples: dict[Sample, None] = field(default_factory=dict)
    ends: list[tuple[float, int, Sample]] = field(default_factory=list)
    changed: int = 0


class Ideal:
    """One run: a sample moves, at no cost, whenever loads differ by two.

    lost: of the measured run. silent_s: simulated seconds until a death is noticed. held: by its own workers that died.
    """

    def __init__(self, case: Case, lost: Sequence[Lost] = (), silent_s: float = 0.0) -> None:
        self._case, self._silent_s, self.held = case, silent_s, 0
        self._step = step_of(case.curve)
        self._numbers = itertools.count()
        self._lost = {number: [one for one in lost if one.worker == number] for number in {one.worker for one in lost}}
        self._open: dict[tuple[int, int], Sample] = {}
        self._engines: dict[int, Engine] = {}
        self._by_load: list[dict[Engine, None]] = [{} for _ in range(ROOM + 1)]
        self._waiting: deque[tuple[Sample, bool]] = deque()  # and whether it gets a place at no cost
        self._due: list[tuple[float, int, Engine, int]] = []
        self._planned: list[tuple[float, int, Callable[[float], None]]] = []

    def makespan(self) -> float:
        """Simulated seconds until the last sample has ended."""
        now = 0.0
        for number in range(self._case.workers):
            self._join(number, now)
        for number, job in enumerate(arrivals(self._case)):
            samples = [Sample(length, length) for length in job.lengths]
            self._open |= {(number, index): sample for index, sample in enumerate(samples)}
            self._plan(job.at, lambda _, samples=samples: self._waiting.extend((one, False) for one in samples))
        for change in changes(self._case):
            self._plan(change.at, lambda at, change=change: self._change(change, at))
        still = len(self._open)
        while still:
            if self._planned and (not self._due or self._planned[0][0] <= self._due[0][0]):
                now, _, happen = heapq.heappop(self._planned)
                happen(now)
            else:
                at, _, engine, changed = heapq.heappop(self._due)
                if engine.changed != changed:
                    continue
                now = at
                self._advance(engine, now)
                self._remove(engine, engine.ends[0][2])
                still -= 1
            self._place(now)
        return now

    def _plan(self, at: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._planned, (at, next(self._numbers), happen))

    def _join(self, number: int, now: float) -> None:
        engine = self._engines[number] = Engine(number, now)
        self._by_load[0][engine] = None

    def _change(self, change: Change, now: float) -> None:
        if change.what == "joins":
            self._join(change.number, now)
            return
        engine = self._engines.pop(change.number)
        if change.what == "dies":
            self.held += len(engine.samples)
            for lost in self._lost.get(change.number, ()):
                self._lose(self._open[lost.job, lost.sample], lost.kept, now)
        for sample in list(engine.samples):
            self._interrupt(sample, now)
            self._waiting.appendleft((sample, change.what == "dies"))  # then it is not one of those that were lost
        del self._by_load[0][engine]
        engine.changed += 1

    def _lose(self, sample: Sample, kept: int, now: float) -> None:
        """It begins anew, but for its tokens that the pool has kept."""
        if sample.engine is not None:
            self._interrupt(sample, now)
            sample.left = max(sample.left, sample.length - kept)
            self._plan(now + self._silent_s, lambda _: self._waiting.appendleft((sample, False)))

    def _interrupt(self, sample: Sample, now: float) -> None:
        engine = sample.engine
        assert engine is not None
        self._advance(engine, now)
        sample.left = sample.end - engine.steps
        self._remove(engine, sample)

    def _place(self, now: float) -> None:
        """Give what waits to the least loaded, then even out."""
        lowest = 0
        while self._waiting:
            lowest = next((load for load in range(lowest, ROOM) if self._by_load[load]), ROOM)
            if lowest == ROOM:
                break
            sample, free = self._waiting.popleft()
            self._add(next(iter(self._by_load[lowest])), sample, now, free=free)
        while True:
            least = next(load for load in range(ROOM + 1) if self._by_load[load])
            most = next(load for load in range(ROOM, -1, -1) if self._by_load[load])
            if most - least < 2:
                break
            giver, taker = next(iter(self._by_load[most])), next(iter(self._by_load[least]))
            sample = next(reversed(giver.samples))
            self._interrupt(sample, now)
            self._add(taker, sample, now, free=True)

    def _advance(self, engine: Engine, now: float) -> None:
        """Pay for prefills, then count steps, up to now."""
        seconds, engine.at = now - engine.at, now
        paid = min(engine.debt, seconds)
        engine.debt -= paid
        if engine.samples:
            engine.steps += (seconds - paid) / self._step(len(engine.samples))

    def _add(self, engine: Engine, sample: Sample, now: float, *, free: bool) -> None:
        self._advance(engine, now)
        if not free:
            read = (PROMPT + self._case.n - 1) / self._case.n  # as if a job's samples were together
            engine.debt += (read + sample.length - sample.left) / self._case.prefills * self._step(1)
        sample.end = engine.steps + sample.left
        heapq.heappush(engine.ends, (sample.end, next(self._numbers), sample))
        self._load(engine, sample, 1)

    def _remove(self, engine: Engine, sample: Sample) -> None:
        self._load(engine, sample, -1)

    def _load(self, engine: Engine, sample: Sample, more: int) -> None:
        del self._by_load[len(engine.samples)][engine]
        if more > 0:
            engine.samples[sample], sample.engine = None, engine
        else:
            del engine.samples[sample]
            sample.engine = None
        self._by_load[len(engine.samples)][engine] = None
        while engine.ends and (engine.ends[0][2] not in engine.samples or engine.ends[0][2].end != engine.ends[0][0]):
            heapq.heappop(engine.ends)
        engine.changed += 1
        if engine.ends:
            left = max(0.0, engine.ends[0][0] - engine.steps) * self._step(len(engine.samples))
            heapq.heappush(self._due, (engine.at + engine.debt + left, next(self._numbers), engine, engine.changed))
