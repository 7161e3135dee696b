"""Keeps an engine from generating while its weights are no whole version."""

from __future__ import annotations

import time

from ..gate import Gate

QUARANTINE_S = 30.0
"""An engine whose weights nobody mends in this time is restarted."""


class Quarantine:
    """Holds the gate of generation from a load that broke off half way until a whole version is there.

    That takes milliseconds when the next version comes. A restart of the engine takes a minute.
    patient: a version is awaited, however long that takes.
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
        """Whether the weights are still no version after QUARANTINE_S, and `patient` is not set."""
        return self.on and not self.patient and time.monotonic() - self._since > QUARANTINE_S

    def begin(self, *, patient: bool = False) -> None:
        """The weights are no version."""
        if not self.on:
            self._since = time.monotonic()
        self.patient = patient
        self._holder.acquire()

    def end(self) -> None:
        """The weights are a whole version again."""
        self._holder.release()
        self.patient = False
