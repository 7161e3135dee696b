"""The ribbon of a recorded run: each worker's versions and states over time, when it died, and what that cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ..journal import Run, WorkerLife
from .lanes import Span, Tick
from .verdict import Died

DOWN = "engine down"
Frame = Mapping[str, npt.NDArray[Any]]


@dataclass(slots=True)
class Track:
    """A worker's row. present: (from, until) in which it was in the pool; empty if only its results are known. tokens:
    about how many a death cost, None if nobody died or nobody knows."""

    spans: list[Span] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    present: tuple[float, float] | None = None
    died: Died | None = None
    tokens: float | None = None

    def at(self, t: float) -> tuple[str, int | None]:
        """State and version at a time."""
        if (span := self.span(t)) is None:
            return "", None
        return ("gone", None) if span[1] is not None and t >= span[1] else (span[3], span[2])

    def span(self, t: float) -> Span | None:
        """The last one that had begun by then."""
        return next((one for one in reversed(self.spans) if one[0] <= t), None)


def tracks_of(recording: Run, attempts: Frame, samples: Frame) -> dict[str, Track]:
    """The track of each worker, by name."""
    found: dict[str, Track] = {}
    lost = _lost_attempts(recording, attempts)
    rate = _rate(samples)
    for name, life in recording.workers.items():
        if life.own:
            track = _of_events(life)
            if not life.ended and name in lost:
                _died(track, life, "silent: others took its jobs again")
            track.tokens = _cost(track, attempts, lost.get(name), rate)
        else:
            track = _of_results(recording, name, samples)
        found[name] = track
    return found


def faults(recording: Run, kind: str) -> list[tuple[float, str, int | None, str]]:
    """Faults of workers whose texts begin with this, in order of time: when, whose, at which version, the rest."""
    return sorted(
        (at, name, version, text.removeprefix(kind))
        for name, life in recording.workers.items()
        for at, what, version, text in life.events
        if what == "fault" and text.startswith(kind)
    )


def _of_events(life: WorkerLife) -> Track:
    track, state, version = Track(), "serving", None
    for at, what, told, text in sorted(life.events, key=lambda it: it[0]):
        if what == "state":
            state = text
        else:
            track.ticks.append([at, what, told if told is not None else version, text])
        if what in {"join", "sync"}:
            state, version = state if what == "sync" and state != DOWN else "serving", told
        elif what == "fault" and text.startswith("engine died"):
            state = DOWN
        if what in {"leave", "death"}:
            _close(track, at)
            if what == "death":
                track.died = Died(at, life.name, life.host, text, at - life.began)
            continue
        if not track.spans or track.spans[-1][1] is not None or track.spans[-1][2:] != [version, state]:
            _close(track, at)
            track.spans.append([at, None, version, state])
    if not track.spans and math.isfinite(life.began):
        track.spans.append([life.began, None, None, "serving"])
    end = track.spans[-1][1] if track.spans and track.spans[-1][1] is not None else life.heard
    track.present = life.began, max(life.began, end)
    return track


def _close(track: Track, at: float) -> None:
    if track.spans and track.spans[-1][1] is None:
        track.spans[-1][1] = at


def _died(track: Track, life: WorkerLife, why: str) -> None:
    _close(track, life.heard)
    track.ticks.append([life.heard, "death", track.spans[-1][2] if track.spans else None, why])
    track.died = Died(life.heard, life.name, life.host, why, life.heard - life.began)


def _of_results(recording: Run, name: str, samples: Frame) -> Track:
    """Without its own journal: from its first sample to its last one, by the versions that sampled them."""
    here = np.flatnonzero((samples["worker"] == recording.names[name]) & ~np.isnan(samples["at"]))
    track = Track()
    for row in here[np.argsort(samples["at"][here])]:
        at, version = float(samples["at"][row]), int(samples["newest"][row])
        begin = at - float(samples["generating"][row])
        if track.spans and track.spans[-1][2] == version:
            track.spans[-1][1] = at
        elif not track.spans or version > track.spans[-1][2]:
            if track.spans:
                begin = max(begin, track.spans[-1][1])
            track.spans.append([min(begin, at), at, version, "serving"])
    return track


def _lost_attempts(recording: Run, attempts: Frame) -> dict[str, npt.NDArray[Any]]:
    """Rows of attempts that their workers never ended, and that a later attempt took over; by worker."""
    newest = np.zeros(attempts["job"].max(initial=0) + 1, np.int64)
    np.maximum.at(newest, attempts["job"], attempts["attempt"])
    later = newest[attempts["job"]]
    unfinished = (attempts["over"] == 0) & (attempts["kept"] < np.maximum(1, attempts["samples"]))
    rows = np.flatnonzero(unfinished & (later > attempts["attempt"]))
    found: dict[str, npt.NDArray[Any]] = {}
    for number in np.unique(attempts["worker"][rows]):
        found[recording.names.texts[number]] = rows[attempts["worker"][rows] == number]
    return found


def _rate(samples: Frame) -> float | None:
    """Tokens a second of one sample, in the mean of the run."""
    known = ~np.isnan(samples["at"]) & (samples["generating"] > 0)
    seconds = float(samples["generating"][known].sum())
    return float(samples["tokens"][known].sum()) / seconds if seconds > 0 else None


def _cost(track: Track, attempts: Frame, rows: npt.NDArray[Any] | None, rate: float | None) -> float | None:
    """About the tokens that were generated and not saved when it died."""
    if track.died is None or rate is None:
        return None
    if rows is None:
        return 0.0
    since = np.fmax(attempts["at"][rows], np.nan_to_num(attempts["saved_at"][rows], nan=-math.inf))
    left = np.maximum(0, attempts["samples"][rows] - attempts["kept"][rows])
    return float((np.maximum(0.0, track.died.at - since) * left).sum() * rate)
