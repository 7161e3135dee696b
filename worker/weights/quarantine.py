"""Keeps an engine from generating while its weights are no whole version."""

from __future__ import annotations

import time

from ..gate import Gate

QUARANTINE_S = 30.0
"""Seconds after which an engine whose weights are still no version is restarted."""


class Quarantine:
    """Holds the gate of generation from a load that broke off midway until a whole version is there.

    The next version takes milliseconds to arrive. A restart of the engine takes a minute.
    patient: wait for a version as long as it takes.
    """

    def __init__(self, gate: Gate) -> None:
        self._holder = gate.holder("quarantine")
        self._since = 0.0
        self.patient = False

    @property
    def on(self) -> bool:
        return self._holder.holds

    @property
    def overdue(self) -> bool:
        """Whether the weights are still no version after QUARANTINE_S. False if `patient` is set."""
        return self.on and not self.patient and time.monotonic() - self._since > QUARANTINE_S

    def begin(self, *, patient: bool = False) -> None:
        """Begin, because the weights are no version."""
        if not self.on:
            self._since = time.monotonic()
        self.patient = patient
        self._holder.acquire()

    def end(self) -> None:
        """End, because the weights are a whole version again."""
        self._holder.release()
        self.patient = False
