"""How long a worker's start took, phase by phase."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

PHASES = ("process", "imports", "model", "graphs", "engine", "weights", "first_answer")
"""In their order. docs/operator.md says what belongs to which."""


def process_age_s() -> float:
    """Seconds since this process began, as the kernel counts them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # a program's name may have spaces
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class Startup:
    """The phases of one worker's first start. A later restart of the engine changes nothing here.

    seconds: by phase, each known when it ends. The phases follow one another from the start of the process, so up to
    `weights` they add up to the time until the worker served.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = time.monotonic() - process_age_s()

    def engine_starts(self) -> None:
        """Note that the engine is started now."""
        self._end("process")

    def engine_is_up(self, parts: Mapping[str, float]) -> None:
        """Note that the engine is up. parts: seconds that it counted inside, by phase; the rest is `imports`."""
        if "process" in self.seconds and "imports" not in self.seconds:
            self._end("imports")
            inside = {phase: round(seconds, 3) for phase, seconds in parts.items() if phase in PHASES and seconds > 0}
            self.seconds["imports"] = round(max(0.0, self.seconds["imports"] - sum(inside.values())), 3)
            self.seconds |= inside

    def serves(self) -> None:
        """Note that the worker serves."""
        if "imports" in self.seconds and "weights" not in self.seconds:
            self._end("weights")

    def answered(self, seconds: float) -> None:
        """Note how long a sample was in the engine. The first one counts."""
        self.seconds.setdefault("first_answer", round(seconds, 3))

    def _end(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = round(max(0.0, now - self._ended), 3)
        self._ended = now
