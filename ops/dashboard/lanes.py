"""The ribbon of a live pool: for each worker which version it served when, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...messages.model import WorkerStatus
from ...producer.diagnosis import PoolReading
from ...sync.transfer import Epoch
from ..terminal import printable
from .verdict import WINDOW_S, Died, Refusal

Span = list[Any]
"""[from, until or None, version, state]"""
Tick = list[Any]
"""[time, kind, version or None, text]"""
STALL_S = 60.0
"""A worker with samples in its engine that has generated nothing for so long stands still."""
MOST = 400
"""Spans and ticks of a lane."""
TEXT = 300


def state_of(status: WorkerStatus, alive: bool) -> str:
    """A worker's state in one word."""
    return "dead" if not alive else "sleeping" if "asleep" in status.blocks else status.state


@dataclass(slots=True)
class Lane:
    """One worker's row."""

    host: str = ""
    spans: list[Span] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    since: float | None = None  # it joined while somebody looked
    tokens: tuple[int, float] = (0, 0.0)  # generated, and when that last grew
    restarts: int = 0
    stalled: bool = False
    warned: Refusal | None = None  # it serves, and says what is wrong all the same


class Ribbon:
    """The lanes, as readings change them. What is older than the window is forgotten.

    Of the last 15 minutes. deaths: of workers. restarts, stalls: (time, worker). publishes: (time, version, state,
    text).
    """

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.deaths: list[Died] = []
        self._refusals: list[Refusal] = []
        self.restarts: list[tuple[float, str]] = []
        self.stalls: list[tuple[float, str]] = []
        self.publishes: list[Tick] = []
        self._first = True
        self._leases_lost = 0
        self._lease_ends: Mapping[str, float] = {}
        self._spans: dict[str, list[Span]] = {}
        self._ticks: dict[str, list[Tick]] = {}
        self._gone: list[str] = []

    @property
    def refusals(self) -> list[Refusal]:
        """Versions that workers did not take in the last 15 minutes, and snapshots that they warn of now."""
        return sorted([*self._refusals, *(it.warned for it in self.lanes.values() if it.warned is not None)])

    def changes(self) -> dict[str, Any]:
        """What has changed since this was asked, for a tick."""
        changed = {"spans": self._spans, "ticks": self._ticks, "gone": self._gone}
        self._spans, self._ticks, self._gone = {}, {}, []
        return changed

    def take(self, pool: PoolReading, ended: tuple[Epoch, ...]) -> None:
        """Take in a reading, and the transfers that have ended."""
        alive, at = {one.worker_id for one in pool.alive}, pool.at
        for epoch in ended:
            self._ended(epoch, pool)
        for status in pool.workers:
            self._seen(status, status.worker_id in alive, at)
        self._missing(pool)
        self._forget(at - WINDOW_S)
        self._first = False

    def _seen(self, status: WorkerStatus, alive: bool, at: float) -> None:
        lane = self.lanes.get(status.worker_id)
        if lane is None:
            lane = self.lanes[status.worker_id] = Lane(status.host, restarts=status.engine_restarts)
            if not self._first:
                lane.since = at
                self._tick(status.worker_id, [at, "join", status.version, f"on {status.host}"])
        last = lane.spans[-1] if lane.spans else None
        version, state = status.version, state_of(status, alive)
        if last is not None and last[1] is None and version != last[2]:
            self._tick(status.worker_id, [at, "sync", version, f"serves version {version}, digests verified"])
        if last is None or last[1] is not None or [version, state] != last[2:]:
            if state == "dead":
                self._died(status.worker_id, lane, at, "silent: its lease has run out")
            self._span(status.worker_id, lane, [at, None, version, state])
        self._watch(status, lane, at)

    def _watch(self, status: WorkerStatus, lane: Lane, at: float) -> None:
        name = status.worker_id
        if status.engine_restarts > lane.restarts:
            self.restarts.append((at, name))
            self._tick(name, [at, "fault", status.version, f"its engine was started again; {status.why}"])
        lane.restarts = status.engine_restarts
        if status.blocks or not status.why:
            lane.warned = None
        elif lane.warned is None:
            lane.warned = Refusal(at, name, status.version, printable(status.why))
            self._tick(name, [at, "fault", status.version, status.why])
        if status.generated_tokens != lane.tokens[0] or not status.running or status.tokens_per_s:
            lane.tokens, lane.stalled = (status.generated_tokens, at), False
        elif not lane.stalled and at - lane.tokens[1] >= STALL_S:
            lane.stalled = True
            self.stalls.append((at, name))
            told = f"{status.running} samples in its engine, and no token for {STALL_S:.0f} s"
            self._tick(name, [at, "stall", status.version, told])

    def _missing(self, pool: PoolReading) -> None:
        """Close the lanes of those that are no workers of the pool any more. Of these as many have died as leases were
        lost since the reading before, those first whose leases ended first; the others have left."""
        at, here = pool.at, {one.worker_id for one in pool.workers}
        missing = [(name, it) for name, it in self.lanes.items() if name not in here and it.spans[-1][1] is None]
        missing.sort(key=lambda it: self._lease_ends.get(it[0], 0.0))
        lost = pool.load.leases_lost - self._leases_lost
        for name, lane in missing:
            last = lane.spans[-1]
            if last[3] == "dead":
                lost -= 1
            elif lost > 0 and not self._first:
                lost -= 1
                self._died(name, lane, at, "its lease has run out")
            else:
                self._tick(name, [at, "leave", last[2], "it has left"])
            last[1] = at
            self._spans.setdefault(name, []).append(list(last))
        self._leases_lost, self._lease_ends = pool.load.leases_lost, pool.lease_ends

    def _died(self, name: str, lane: Lane, at: float, why: str) -> None:
        self.deaths.append(Died(at, name, lane.host, why, None if lane.since is None else at - lane.since))
        self._tick(name, [at, "death", lane.spans[-1][2] if lane.spans else None, why])

    def _ended(self, epoch: Epoch, pool: PoolReading) -> None:
        told = epoch.announcement
        failures = "; ".join(f"{worker}: {why}" for worker, why in epoch.failures.items())
        state = "ok" if epoch.served else "failed"
        what = f"adapter {told.adapter} " if told.adapter else ""
        text = f"{what}{len(epoch.served)} workers have it{', failed on ' + failures if failures else ''}"
        self.publishes.append([pool.at, told.version, state, printable(text[:TEXT])])
        for worker, why in epoch.failures.items():
            self._refusals.append(Refusal(pool.at, worker, told.version, printable(why[:TEXT])))
            if worker in self.lanes:
                self._tick(worker, [pool.at, "fault", told.version, f"did not take version {told.version}: {why}"])

    def _span(self, name: str, lane: Lane, span: Span) -> None:
        changed = self._spans.setdefault(name, [])
        if lane.spans and lane.spans[-1][1] is None:
            lane.spans[-1][1] = span[0]
            changed.append(list(lane.spans[-1]))
        lane.spans.append(span)
        changed.append(list(span))

    def _tick(self, name: str, tick: Tick) -> None:
        tick[3] = printable(tick[3][:TEXT])
        self.lanes[name].ticks.append(tick)
        self._ticks.setdefault(name, []).append(tick)

    def _forget(self, before: float) -> None:
        """Drop what is older."""
        for lane in self.lanes.values():
            while len(lane.spans) > MOST or (lane.spans and lane.spans[0][1] is not None and lane.spans[0][1] < before):
                lane.spans.pop(0)
            while len(lane.ticks) > MOST or (lane.ticks and lane.ticks[0][0] < before):
                lane.ticks.pop(0)
        gone = [name for name, lane in self.lanes.items() if not lane.spans]
        self._gone += gone
        for name in gone:
            del self.lanes[name]
        for events in (self.deaths, self._refusals, self.restarts, self.stalls, self.publishes):
            while events and events[0][0] < before:
                events.pop(0)


def workers_of(pool: PoolReading) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The contract's `workers`."""
    alive = {one.worker_id for one in pool.alive}
    for one in pool.workers:
        here = one.worker_id in alive
        yield one.worker_id, {
            "state": state_of(one, here), "version": one.version, "alive": here, "host": one.host,
            "running": one.running, "max_running": one.max_running, "restarts": one.engine_restarts,
            "tokens_per_s": round(one.tokens_per_s, 1) if here else 0.0,
        }  # fmt: skip
