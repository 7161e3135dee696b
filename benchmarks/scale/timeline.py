"""What happened over simulated time: hours of GPUs, and how long jobs waited."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(slots=True)
class Timeline:
    """One worker has one GPU. A worker is used while a sample runs on it, and idle while it serves without one.

    starting: workers on their way, as of now. waits: seconds, by why the job came to the queue.
    """

    starting: int = 0
    now: float = 0.0
    gpu_s: dict[str, float] = field(default_factory=lambda: {"used": 0.0, "idle": 0.0, "starting": 0.0})
    slot_s: float = 0.0
    waits: dict[str, list[float]] = field(default_factory=dict)
    _running: dict[Hashable, int] = field(default_factory=dict)  # samples on each worker that serves
    _used: int = 0
    _samples: int = 0

    def uses(self, worker: Hashable, running: int | None) -> None:
        """A worker that serves has so many samples; None for one that is gone."""
        before = self._running.pop(worker, 0)
        self._used -= before > 0
        self._samples -= before
        if running is not None:
            self._running[worker] = running
            self._used += running > 0
            self._samples += running

    def waited(self, why: str, seconds: float) -> None:
        """A job was claimed so long after it came to the queue; why: new, handed over or dead."""
        self.waits.setdefault(why, []).append(seconds)

    def advance(self, at: float) -> None:
        """Nothing changed until then."""
        passed, self.now = at - self.now, at
        self.gpu_s["used"] += passed * self._used
        self.gpu_s["idle"] += passed * (len(self._running) - self._used)
        self.gpu_s["starting"] += passed * self.starting
        self.slot_s += passed * self._samples

    def figures(self, slots: int) -> dict[str, Any]:
        """Hours of GPUs, and seconds that jobs waited: new ones in the queue, the others until their next claim."""
        served_s = self.gpu_s["used"] + self.gpu_s["idle"]
        return {
            "queue_s": spread(self.waits.get("new", [])),
            "again_s": {why: spread(found) for why, found in sorted(self.waits.items()) if why != "new"},
            "gpu_hours": {name: round(seconds / 3600, 2) for name, seconds in self.gpu_s.items()},
            "slots_used": round(self.slot_s / (served_s * slots), 4) if served_s else 0.0,
        }


def spread(found: Sequence[float]) -> dict[str, float]:
    """How many, p50, p95 and the largest."""
    if not found:
        return {"count": 0}
    p50, p95, most = (round(float(one), 3) for one in np.percentile(found, (50, 95, 100)))
    return {"count": len(found), "p50": p50, "p95": p95, "max": most}
