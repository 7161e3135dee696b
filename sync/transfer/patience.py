"""Backs off from workers that ask for a transfer and then refuse it, so that they do not hold up the others."""

from __future__ import annotations

import time

LONGEST_PAUSE_S = 60.0


class Patience:
    """A back-off per worker: pauses of 1, 2, 4 … seconds, at most LONGEST_PAUSE_S."""

    def __init__(self) -> None:
        self._refusals: dict[str, tuple[int, float]] = {}  # refusals in a row, and the end of the pause

    def lasts(self, who: str) -> bool:
        """Whether `who` may be tried now."""
        return self._refusals.get(who, (0, 0.0))[1] <= time.monotonic()

    def tried(self, who: str, *, well: bool) -> None:
        """Note how a transfer to `who` went. well: it has the version now."""
        if well:
            self._refusals.pop(who, None)
            return
        times = self._refusals.get(who, (0, 0.0))[0]
        self._refusals[who] = times + 1, time.monotonic() + min(LONGEST_PAUSE_S, 2.0**times)

    def forget(self) -> None:
        """End all pauses: there is a new version."""
        self._refusals.clear()
