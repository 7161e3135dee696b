"""A recorded run at any of its moments: the page's State, and the series over all of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...messages.errors import ConfigError
from ...messages.journal import read
from ...messages.model import PRIORITIES
from ...messages.remote import without_secrets
from ...producer.diagnosis import Reason
from ..journal import Run
from .causes import grouped
from .tracks import faults, tracks_of
from .verdict import WINDOW_S, Moment, Refusal, Rewards, frame_of

Float = npt.NDArray[np.float64]
POINTS = 900
VERSIONS = 200
RATE_S = 60.0
FULL, PATIENCE_S = 0.8, 60.0
MOST_STALE = 64
NO_WORKER = "no worker's journal is here: workers, deaths and idle time are known from results alone"


def load(folder: str) -> History:
    """Read a journal, whole. Raises ConfigError if there is no such folder, or nothing in it."""
    recording = Run()
    recording.take(read(folder, on_problem=recording.problem))
    if not math.isfinite(recording.first):
        raise ConfigError(f"journal {without_secrets(folder)!r}: it has no entry that can be read")
    return History(recording, without_secrets(folder))


class History:
    """What a recording says at time T, in seconds since 1970. It must not be added to any more.

    have: (samples,) whether a result came. behind: see `_staleness`.
    """

    def __init__(self, recording: Run, pool: str = "") -> None:
        self.recording, self.pool = recording, pool
        self.jobs, self.samples = recording.jobs.frame(), recording.samples.frame()
        self.attempts = recording.attempts.frame()
        self.tracks = tracks_of(recording, self.attempts, self.samples)
        refused = faults(recording, "refused: ")
        self.refusals = [Refusal(at, name, version or 0, why) for at, name, version, why in refused]
        self.restarts = [(at, name) for at, name, *_ in faults(recording, "engine died")]
        self.publishes: list[list[Any]] = [[at, v, *told] for (at, v), told in sorted(recording.publishes.items())]
        self.job_names = list(recording.job_ids)
        self.began = recording.first if math.isfinite(recording.first) else 0.0
        self.ended = recording.last if math.isfinite(recording.last) else 0.0
        self.own = any(life.own for life in recording.workers.values())
        self._estimate_claims()
        self.have = ~np.isnan(self.samples["at"])
        self.deaths = sorted(track.died for track in self.tracks.values() if track.died is not None)
        self.behind = self._staleness()

    def _estimate_claims(self) -> None:
        """Where no worker says when it claimed a job, its first result does."""
        of, samples = self.jobs, self.samples
        began = samples["at"] - np.nan_to_num(samples["generating"]) - np.nan_to_num(samples["waiting"])
        first = np.full(len(of["at"]), np.nan)
        np.fmin.at(first, samples["job"], began)
        of["claimed"] = np.where(np.isnan(of["claimed"]), first, of["claimed"])

    def _staleness(self) -> Float:
        """(samples,) by how many versions each was behind when it was consumed; NaN for what was not, or is unknown."""
        found = sorted((at, version) for version, at in self.recording.committed.items())
        times = np.array([at for at, _ in found], np.float64)
        versions = np.maximum.accumulate(np.array([version for _, version in found], np.int64))  # newest by then
        samples, behind = self.samples, self.samples["stale"].copy()
        if len(times):
            place = np.searchsorted(times, samples["consumed"], "right") - 1
            known = ~np.isnan(samples["consumed"]) & (place >= 0) & (samples["newest"] >= 0) & np.isnan(behind)
            behind[known] = np.maximum(0, versions[place[known]] - samples["newest"][known])
        return behind

    # --- State at a time ---

    def state(self, at: float | None = None, *, brief: bool = False) -> dict[str, Any]:
        """The contract's State. brief: without lanes and series."""
        end = self.ended
        t = end if at is None or not math.isfinite(at) else max(self.began, min(at, end))
        frame = self._frame(t, over=t >= end)
        if brief:
            return frame
        lanes = {name: {"spans": it.spans, "ticks": it.ticks} for name, it in self.tracks.items() if it.spans}
        return frame | {"lanes": lanes, "series": self.series}

    def _frame(self, t: float, *, over: bool) -> dict[str, Any]:
        flow = self._flow(t)
        stale, unclaimed = self.staleness(self.began if over else t - WINDOW_S, t), self.unclaimed(t)

        def within(events: Sequence[Any]) -> list[Any]:
            found = [one for one in events if one[0] <= t]
            since = t
            for one in reversed(found if not over else ()):
                since = one[0] if one[0] >= since - WINDOW_S else since
            return found if over else [one for one in found if since <= one[0]]

        scale, scale_since = self._scale(t, flow)
        moment = Moment(
            at=t, over=over, running=flow["running"], scale=scale, scale_since=scale_since,
            reasons=self._stopped(t, waits=bool(unclaimed) or scale[0] in {"starting", "unclaimed"}, over=over),
            deaths=within(self.deaths), refusals=within(self.refusals), restarts=within(self.restarts),
            failures=grouped(one for one in self.recording.failures.values() if one.at <= t),
            stale=stale, rewards=self.rewards(t), unclaimed=unclaimed,
            lost_entries=self.recording.lost,
        )  # fmt: skip
        frame = frame_of(moment)
        if over and not self.own:
            frame["verdict"]["why"].append(NO_WORKER)
        return frame | {
            "pool": self.pool, "mode": "journal", "can_act": False, "began": self.began, "ended": self.ended,
            "workers": self._workers(t), "publishes": self.publishes, "flow": flow, "versions": self._by_version(t),
        }  # fmt: skip

    def _scale(self, t: float, flow: dict[str, Any]) -> tuple[tuple[str, str], float]:
        """As the scaling policy names it, from what a journal has; and since when."""
        times, states = self._scaled
        place = max(0, int(np.searchsorted(times, t, "right")) - 1)
        serving = sum(track.at(t)[0] == "serving" for track in self.tracks.values())
        told = f"{flow['queued']} jobs wait and {flow['running']} run on {serving} workers"
        return (str(states[place]), told), float(times[place])

    @cached_property
    def _served(self) -> tuple[Float, Float]:
        """From when to when a worker served, for each such span; NaN for those that have no end."""
        spans = [it[:2] for track in self.tracks.values() for it in track.spans if it[3] == "serving"]
        begin, end = np.array(spans, np.float64).reshape(-1, 2).T  # None becomes NaN
        return begin, end

    @cached_property
    def _scaled(self) -> tuple[Float, npt.NDArray[np.str_]]:
        """When that changed, and to what."""
        begin, end = self._served
        of_jobs = [self.jobs[name] for name in ("at", "claimed", "end")]
        at = np.unique(np.concatenate([[self.began], *of_jobs, begin, end]))
        waits, runs = self._counts(at := at[~np.isnan(at)])
        nobody = _until(begin, at) == _until(end, at)
        of = [(waits == 0) & (runs == 0), (waits > 0) & nobody, (waits > 0) & (runs > 0), (waits > 0) & self.own]
        states = np.select(of, ["idle", "starting", "starved", "unclaimed"], "balanced")
        changed = np.append(True, states[1:] != states[:-1])
        return at[changed], states[changed]

    def _counts(self, at: Float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Jobs that waited and that ran at these times."""
        jobs, began = self.jobs, np.fmin(self.jobs["claimed"], self.jobs["end"])
        waited = _until(jobs["at"], at) - _until(np.where(np.isnan(jobs["at"]), np.nan, began), at)
        return np.maximum(0, waited), np.maximum(0, _until(began, at) - _until(jobs["end"], at))

    def _stopped(self, t: float, *, waits: bool, over: bool) -> list[Reason]:
        """Workers that were paused or asleep while jobs waited that nobody took; if it is over, also those that were
        left paused."""
        spans = {name: it.span(t) for name, it in self.tracks.items() if it.died is None or it.died.at > t}
        here = {name: it for name, it in spans.items() if it is not None and (over or it[1] is None or t < it[1])}
        paused = {name: it for name, it in here.items() if it[3] == "paused"}
        found = paused or {name: it for name, it in here.items() if it[3] == "sleeping" and waits}
        if not found or not (over or waits):
            return []
        who = f"{', '.join([*found][:3])}{' …' * (len(found) > 3)}"
        what = f"{'were left' if over else 'are'} {'paused' if paused else 'asleep'}"
        told = f"{len(found)} of {len(here)} workers {what} ({who})"
        do = f"`rolloutmq control {'resume' if paused else 'wake'}`."
        return [Reason("paused" if paused else "asleep", told, do, min(it[0] for it in found.values()), stops=waits)]

    def _workers(self, t: float) -> dict[str, Any]:
        here, names = self._lately(t, RATE_S), len(self.recording.names.texts)
        tokens = np.bincount(self.samples["worker"][here], self.samples["tokens"][here], names)
        runs = (self.attempts["at"] <= t) & (self.attempts["end"] > t)
        running = np.bincount(self.attempts["worker"][runs], minlength=names)
        found = {}
        for name, track in self.tracks.items():
            state, version = track.at(t)
            dead = track.died is not None and track.died.at <= t
            if not state or (state == "gone" and not dead):
                continue
            life, number = self.recording.workers[name], self.recording.names[name]
            found[name] = {
                "state": "dead" if dead else state, "version": version, "alive": not dead, "host": life.host,
                "running": int(running[number]), "max_running": life.slots, "restarts": sum(
                    who == name and at <= t for at, who in self.restarts),
                "tokens_per_s": round(float(tokens[number]) / RATE_S, 1),
            }  # fmt: skip
        return found

    def _flow(self, t: float) -> dict[str, Any]:
        jobs, samples = self.jobs, self.samples
        over, claimed, waits = jobs["end"] <= t, jobs["claimed"] <= t, self.waiting(t)
        ages = {
            name: ages_of(t - jobs["at"][waits & (jobs["priority"] == place)]) for place, name in enumerate(PRIORITIES)
        }
        recent = self._lately(t, RATE_S)
        seconds = min(RATE_S, max(1.0, t - self.began))
        return {
            "queued": int(waits.sum()), "running": int((claimed & ~over).sum()), "ages": ages,
            "done": int((over & (jobs["ok"] == 1)).sum()), "failed": int((over & (jobs["ok"] == 0)).sum()),
            "consumed": int((samples["consumed"] <= t).sum()) if self.recording.counts["consumed"] else None,
            "tokens_per_s": round(float(samples["tokens"][recent].sum()) / seconds, 1), "trainer_waits": self._waits(t),
        }  # fmt: skip

    def waiting(self, t: float) -> npt.NDArray[np.bool_]:
        """(jobs,) which had been accepted by then, and nobody had claimed."""
        return (self.jobs["at"] <= t) & ~(self.jobs["claimed"] <= t) & ~(self.jobs["end"] <= t)

    def _lately(self, t: float, seconds: float) -> npt.NDArray[np.bool_]:
        """(samples,) which had come by then, and no longer ago than this."""
        return (self.samples["at"] <= t) & (self.samples["at"] > t - seconds)

    def _waits(self, t: float) -> float | None:
        """The part of the last 15 minutes in which the trainer waited for samples; None if it does not say."""
        waited = self.samples["waited"][self._lately(t, WINDOW_S)]
        seconds = min(WINDOW_S, max(1.0, t - self.began))
        return None if np.isnan(waited).all() else round(min(1.0, float(np.nansum(waited)) / seconds), 3)

    def staleness(self, since: float, t: float) -> dict[int, int]:
        """Samples that were consumed in this time, by how many versions each was behind."""
        here = (self.samples["consumed"] >= since) & (self.samples["consumed"] <= t) & ~np.isnan(self.behind)
        found = Counter(np.minimum(self.behind[here], MOST_STALE).astype(int).tolist())
        return dict(sorted(found.items()))

    def _by_version(self, t: float) -> dict[str, Any]:
        """Of samples by the newest version that sampled them."""
        here = np.flatnonzero((self.samples["at"] <= t) & (self.samples["newest"] >= 0))
        newest = self.samples["newest"][here]
        found: dict[str, Any] = {}
        for version in np.unique(newest)[-VERSIONS:].tolist():
            rows = here[newest == version]
            found[str(version)] = {
                "samples": len(rows), "reward": _mean(self.samples["reward"][rows]),
                "staleness": _mean(self.behind[rows]), "tokens": int(self.samples["tokens"][rows].sum()),
                "at": float(self.samples["at"][rows].min()),
            }  # fmt: skip
        return found

    def rewards(self, t: float) -> dict[int, Rewards]:
        """Of each version the samples with a reward."""
        here = (self.samples["at"] <= t) & ~np.isnan(self.samples["reward"]) & (self.samples["newest"] >= 0)
        reward, version = self.samples["reward"][here], self.samples["newest"][here]
        numbers, place = np.unique(version, return_inverse=True)
        sums = [np.bincount(place, it, len(numbers)) for it in (None, reward, reward**2)]
        first = np.full(len(numbers), t)
        np.minimum.at(first, place, self.samples["at"][here])
        told = zip(numbers, *sums, first, strict=True)
        return {int(v): Rewards(int(n), float(s), float(q), float(since)) for v, n, s, q, since in told}

    def unclaimed(self, t: float) -> list[tuple[str, int, float]]:
        """Jobs that nobody had claimed by then, though later ones were: what they ask for, how many, since when."""
        jobs = self.jobs
        later = jobs["at"][jobs["claimed"] <= t]
        until = min(np.nanmax(later, initial=-math.inf), t if t >= self.ended else t - PATIENCE_S)
        waits = (jobs["at"] < until) & ~(jobs["claimed"] <= t) & ~((jobs["end"] <= t) & (jobs["ok"] == 1))
        found = []
        for asks in np.unique(jobs["asks"][waits]):
            since = jobs["at"][waits & (jobs["asks"] == asks)]
            found.append((self.recording.names.texts[asks], len(since), float(since.min())))
        return sorted(found, key=lambda it: -it[1])[:8]

    # --- over the whole run ---

    @cached_property
    def series(self) -> dict[str, list[float | None]]:
        """The contract's series: at most POINTS points from begin to end."""
        at = np.linspace(self.began, self.ended, POINTS if self.ended > self.began else 1)
        samples, done = self.samples, np.where(self.jobs["ok"] == 1, self.jobs["end"], np.nan)
        waits, runs = self._counts(at)
        begin, end = self._served
        serving = _until(begin, at) - _until(end, at, "left")
        tokens = np.histogram(samples["at"][self.have], [*at, at[-1] + 1e-3], weights=samples["tokens"][self.have])[0]
        width = max(1e-9, float(at[1] - at[0])) if len(at) > 1 else 1.0
        consumed = _until(samples["consumed"], at).tolist() if self.recording.counts["consumed"] else [None] * len(at)
        return {
            "at": at.tolist(), "queued": waits.tolist(), "running": runs.tolist(), "done": _until(done, at).tolist(),
            "consumed": consumed,
            "tokens_per_s": np.round(tokens / width, 1).tolist(), "serving": serving.tolist(),
            "age_p95": self._age_series(at),
        }  # fmt: skip

    def _age_series(self, at: Float) -> list[float | None]:
        """p95 of how long the jobs that were claimed in a bin had waited."""
        waited, claimed = self.jobs["claimed"] - self.jobs["at"], self.jobs["claimed"]
        known = ~np.isnan(waited)
        place = np.searchsorted(at, claimed[known], "left")
        order = np.argsort(place, kind="stable")
        edges = np.searchsorted(place[order], np.arange(len(at) + 1))
        ordered = np.maximum(0.0, waited[known][order])
        pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        return [round(float(np.percentile(ordered[a:b], 95)), 3) if b > a else None for a, b in pairs]


def _until(times: Float, at: Float, side: Literal["left", "right"] = "right") -> npt.NDArray[np.int64]:
    """How many of these times are no later, for each of `at`; left: earlier."""
    return np.searchsorted(np.sort(times[~np.isnan(times)]), at, side)


def ages_of(ages: Float | Sequence[float]) -> dict[str, Any]:
    """The contract's ages of jobs, in seconds."""
    middle, high = np.percentile(ages, [50, 95]).round(2).tolist() if len(ages) else (None, None)
    return {"p50": middle, "p95": high, "n": len(ages)}


def _mean(values: Float) -> float | None:
    known = values[~np.isnan(values)]
    return round(float(known.mean()), 6) if len(known) else None
