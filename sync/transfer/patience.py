"""A worker that asks for a transfer and then refuses it is tried less and less often, for the others' sake."""

from __future__ import annotations

import time

LONGEST_PAUSE_S = 60.0


class Patience:
    """Pauses of 1, 2, 4 … seconds, at most LONGEST_PAUSE_S, for each worker by itself."""

    def __init__(self) -> None:
        self._refusals: dict[str, tuple[int, float]] = {}  # how often in a row, and until when there is a pause

    def lasts(self, who: str) -> bool:
        """Whether `who` may be tried now."""
        return self._refusals.get(who, (0, 0.0))[1] <= time.monotonic()

    def tried(self, who: str, *, well: bool) -> None:
        """How it went with `who`."""
        if well:
            self._refusals.pop(who, None)
            return
        times = self._refusals.get(who, (0, 0.0))[0]
        self._refusals[who] = times + 1, time.monotonic() + min(LONGEST_PAUSE_S, 2.0**times)

    def forget(self) -> None:
        """There is something new for everybody."""
        self._refusals.clear()
