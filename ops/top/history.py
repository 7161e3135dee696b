"""What a look does not say by itself: rates, and how figures went over the last looks."""

from __future__ import annotations

from collections import deque
from typing import Any

from .reader import Look

KEPT = 240
"""Looks that a curve can show."""
RATE_S = 30.0
"""Seconds over which finished jobs are counted."""
BARS = "▁▂▃▄▅▆▇█"


class History:
    """The last looks at a pool, as series."""

    def __init__(self) -> None:
        self.queued: deque[float] = deque(maxlen=KEPT)
        self.tokens_per_s: deque[float] = deque(maxlen=KEPT)
        self.by_worker: dict[str, deque[float]] = {}
        self._ended: deque[tuple[float, int]] = deque(maxlen=KEPT)

    def add(self, look: Look) -> None:
        """Take in one more look."""
        state = look.state
        self.queued.append(sum(state["queued"].values()))
        self.tokens_per_s.append(speed(state))
        self.by_worker = {
            it["worker_id"]: self.by_worker.get(it["worker_id"], deque(maxlen=KEPT)) for it in state["workers"]
        }
        for worker in state["workers"]:
            self.by_worker[worker["worker_id"]].append(worker["tokens_per_s"] if worker["alive"] else 0.0)
        self._ended.append((look.at, sum(state["ended"].values())))
        while len(self._ended) > 2 and self._ended[1][0] <= look.at - RATE_S:
            self._ended.popleft()

    def jobs_per_s(self) -> float | None:
        """Jobs that ended a second, None before there are two looks, or if the pool's counters began anew."""
        if not self._ended:
            return None
        (since, before), (now, ended) = self._ended[0], self._ended[-1]
        return (ended - before) / (now - since) if now > since and ended >= before else None

    def seconds_of_work(self, state: dict[str, Any]) -> float | None:
        """How long the open jobs take at the pace at which jobs end; None if that is not known."""
        pace = self.jobs_per_s()
        return state["open_jobs"] / pace if pace else 0.0 if state["open_jobs"] == 0 else None


def speed(state: dict[str, Any]) -> float:
    """Tokens a second of all workers that are alive."""
    return float(sum(it["tokens_per_s"] for it in state["workers"] if it["alive"]))


def curve(values: deque[float], width: int) -> str:
    """The newest `width` values as bars between 0 and the highest of them, the newest at the right."""
    shown = list(values)[-width:] if width > 0 else []
    highest = max(shown, default=0.0)
    if highest <= 0:
        return BARS[0] * len(shown)
    return "".join(BARS[min(len(BARS) - 1, int(value / highest * len(BARS)))] for value in shown)
