"""What a worker's engine is: which weights it has, whether it serves them, and what keeps it from that."""

from __future__ import annotations

import asyncio
import time

from ..messages.model import PauseMode, WorkerState
from .gate import Gate, WeightsTurn
from .sleep_states import SleepState

QUARANTINE_S = 30.0
"""Seconds after which an engine whose weights are still no version is restarted."""


class EngineState:
    """The state of one engine. Methods named for what has happened change it; nobody else writes.

    version: of the weights that the next legs run under; 0 for those that it started with, and for none.
    in_service: whether they are verified, and the newest that was committed when the worker looked.
    updating: whether a version is just being loaded. dead: set from the engine's death until it is up again.
    paused: by which command. ordered_by: the last command that paused it or put it to sleep, and whose it was.
    legs: while anybody holds this gate, no leg starts. weights: while anybody holds this gate, nothing is received, so
    the weights stay as they are. frozen, asleep, weights_asleep, pause: who holds them for commands.
    turn: an update takes it, and so does everybody else who changes the weights, needs them unchanged, or replaces the
    engine.
    changed: is set whenever the weights may have to be looked after; the one who does clears it.
    """

    def __init__(self, legs: Gate) -> None:
        self.version = 0
        self.in_service = self.updating = False
        self.paused: PauseMode | None = None
        self.ordered_by = ""
        self.dead, self.changed = asyncio.Event(), asyncio.Event()
        self.legs, self.weights, self.turn = legs, Gate(self.changed.set), WeightsTurn()
        self.pause, self.asleep = legs.holder("pause"), legs.holder("asleep")
        self.frozen, self.weights_asleep = self.weights.holder("frozen"), self.weights.holder("asleep")
        self._no_engine, self._no_version = legs.holder("dead"), legs.holder("quarantine")
        self._no_version_since = 0.0
        self._sleep = SleepState()
        self._random = False
        self.patient = False
        """Whether an engine without a whole version is given as long as it takes."""

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> bool:
        """Whether a load broke off midway: it generates nothing until it has a whole version or is restarted."""
        return self._no_version.holds

    @property
    def overdue(self) -> bool:
        """Whether the weights are still no version after QUARANTINE_S. False if `patient` is set."""
        return self.quarantined and not self.patient and time.monotonic() - self._no_version_since > QUARANTINE_S

    def takes_weights(self) -> bool:
        """Whether weights may be received and loaded now."""
        return self.weights.is_open and not self.dead.is_set()

    @property
    def sleep(self) -> SleepState:
        """Which memory is given up. Weights that were, and are no version since, are one again after a load."""
        if self._sleep.stale and self._sleep.takes_weights and not self.quarantined:
            self._sleep = self._sleep.synced()
        return self._sleep

    @sleep.setter
    def sleep(self, state: SleepState) -> None:
        self._sleep = state

    @property
    def awake(self) -> bool:
        """Whether commands let it serve."""
        return self.paused is None and self.sleep.may_run

    @property
    def may_claim(self) -> bool:
        """Whether jobs may be claimed for it."""
        return self.awake and self.in_service and not self.dead.is_set()

    def blocks(self) -> dict[str, str]:
        """What keeps it from serving, each with who or what that is."""
        stale = "its weights were asleep, and none have come since" if self.sleep.stale else ""
        found = {
            "pause": self.ordered_by if self.paused else "",
            "asleep": self.ordered_by if self.sleep.asleep else "",
            "stale": "its weights are random, and no version has come" if self._random else stale,
            "dead": "its engine is being started again" if self.dead.is_set() else "",
            "quarantine": "its weights are no whole version" if self.quarantined and not self._random else "",
        }
        return {name: why for name, why in found.items() if why}

    def named(self, *, draining: bool) -> WorkerState:
        """The state as a heartbeat says it."""
        if self.dead.is_set():
            return "quarantined"
        if draining:
            return "draining"
        if not self.in_service:
            return "syncing"
        if self.updating:
            return "updating"
        return "serving" if self.awake else "paused"

    # --- what happens to it ----------------------------------------------------------------------------------------

    def died(self) -> bool:
        """It is dead, or counts as dead. False if that was known."""
        if self.dead.is_set():
            return False
        self._no_engine.acquire()
        self.dead.set()
        self.changed.set()
        return True

    def restarted(self) -> bool:
        """It is new, with its base weights, and may be behind. A pause goes on, in an engine that is neither frozen nor
        asleep any more; returns whether it was. The caller has the turn."""
        was = self.frozen.holds or bool(self._sleep.asleep)
        self._sleep = SleepState()
        if self.paused == "in_place":
            self.paused = "interrupt"
        self.version, self.in_service, self.patient = 0, False, False
        for holder in (self.frozen, self.weights_asleep, self.asleep, self._no_version):
            holder.release()
        self.dead.clear()
        self._no_engine.release()
        self.changed.set()
        return was

    def has(self, version: int) -> None:
        """It has a whole version, verified."""
        self.version, self.in_service, self.patient, self._random = version, True, False, False
        self._no_version.release()

    def renamed(self, version: int) -> None:
        """The version that it has is called so from now on."""
        self.version = version

    def broken(self, *, patient: bool = False) -> None:
        """Its weights are no version: it generates nothing until it has a whole one.

        patient: wait as long as it takes. Otherwise it is restarted after QUARANTINE_S.
        """
        if not self.quarantined:
            self._no_version_since = time.monotonic()
        self.patient = patient
        self._no_version.acquire()
        self.version = 0
        self.doubted()

    def is_random(self) -> None:
        """Its weights are random by its configuration: it generates nothing until a version comes, whenever that is."""
        self.broken(patient=True)
        self._random = True

    def doubted(self) -> None:
        """Its version is to be compared with the pool's before it serves again."""
        self.in_service = False
        self.changed.set()

    def confirmed(self) -> None:
        """Its version is no older than the pool's."""
        self.in_service = True
