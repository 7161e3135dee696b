"""The real scaling policy, told of a simulated pool what it would read of a real one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from statistics import fmean

from rolloutmq.ops.scale import History, PoolView, ScaleSettings, decide

from .scenario import Scenario
from .workers import SimulatedWorker

ENDED = 1000
"""Samples that its means are of."""


class Scaler:
    """Asks the policy again and again. states: how often it gave which reason."""

    def __init__(self, scenario: Scenario) -> None:
        self.states: Counter[str] = Counter()
        self._settings = ScaleSettings(
            least=scenario.min_workers,
            most=scenario.max_workers,
            target_s=scenario.target_s,
            stabilise_s=scenario.stabilise_s,
            startup_s=scenario.start_s,
        )
        self._history = History()
        self._slots = scenario.slots
        self._lengths: deque[float] = deque(maxlen=ENDED)
        self._seconds: deque[float] = deque(maxlen=ENDED)

    def ended(self, length: int, seconds: float) -> None:
        """A sample of this length took so long on its last worker."""
        self._lengths.append(length)
        self._seconds.append(seconds)

    def target(self, now: float, queued: int, serving: Sequence[SimulatedWorker], starting: int, draining: int) -> int:
        """How many workers there should be. queued: samples that wait. serving: workers that claim."""
        running = sum(len(worker.running) for worker in serving)
        tokens_per_s = sum(worker.rate * len(worker.running) for worker in serving)
        view = PoolView(
            at=now,
            queued=queued,
            running=running,
            slots=self._slots * len(serving),
            serving=len(serving),
            starting=starting,
            draining=draining,
            tokens_per_s=tokens_per_s,
            worker_tokens_per_s=self._slots * tokens_per_s / running if running else None,
            tokens_per_sample=fmean(self._lengths) if self._lengths else None,
            sample_s=fmean(self._seconds) if self._seconds else None,
        )
        decision, self._history = decide(view, self._settings, self._history)
        self.states[decision.state] += 1
        return decision.wanted
