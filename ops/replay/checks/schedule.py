"""Who claimed what when, from a journal alone: queue times, workers' occupancy, stalls, and broken promises."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....messages.errors import MessageError
from ....messages.journal import Entry, Event
from ....messages.model import RolloutResult

EVENTS: tuple[Event, ...] = ("result", "attempt", "weights", "worker")
"""The entries that a schedule is made of. Those of workers are there if workers wrote journals, too."""
SKEW_S = 1.0
"""Clocks of two hosts may differ by so much, and Redis' answer may come so much later than what it answers: what is
earlier by less may be later."""
GAP_S = 1.0
"""A shorter time in which a worker held no job is no gap."""
SHOWN = 10
"""So many gaps, stalls and violations are printed."""


@dataclass(slots=True)
class Held:
    """An attempt: the time in which a worker held a job, in seconds since 1970. exact: the worker itself wrote when it
    claimed it; else this is computed from the timings of a result."""

    job_id: str
    attempt: int
    worker: str
    start: float
    end: float
    queued_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class Stall:
    """A worker replaced its weights while it held jobs. seconds: for which its engine stood still."""

    worker: str
    version: int
    at: float
    seconds: float
    jobs: int


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """A worker's time in the journal, in seconds: from its first claim to the end of its last one, in which it held any
    job (busy), and what it did. jobs_at_once: the mean. gaps: (start, seconds) without a job, the longest first."""

    worker: str
    start: float
    span_s: float
    busy_s: float
    jobs_at_once: float
    attempts: int
    gaps: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The timeline of a journal.

    queue_s: p50, p99 and the largest time that attempts waited in the queue; empty without any. workers: by id. stalls:
    the longest first. outcomes: number of entries by what happened. violations: promises that were broken, a sentence
    each: that each sample is published once, that attempts increase and have one worker each, that versions never
    decrease within a sample, and that nobody publishes after its lease.
    """

    queue_s: Mapping[str, float]
    workers: Mapping[str, WorkerTime]
    stalls: Sequence[Stall]
    outcomes: Mapping[str, int]
    violations: Sequence[str]

    def lines(self) -> list[str]:
        """For people."""
        lines = [", ".join(f"{count:,} {what}" for what, count in self.outcomes.items()) or "nothing happened"]
        if self.queue_s:
            lines.append("queued: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.queue_s.items()))
        for one in self.workers.values():
            share = one.busy_s / one.span_s if one.span_s else 1.0
            lines.append(f"worker {one.worker}: {one.attempts:,} attempts in {one.span_s:.1f} s, busy {share:.0%}, "
                         f"{one.jobs_at_once:.1f} jobs at once")  # fmt: skip
        gaps = sorted(((s, one.worker, at) for one in self.workers.values() for at, s in one.gaps), reverse=True)
        lines += [f"gap: {worker} held nothing for {seconds:.1f} s" for seconds, worker, _ in gaps[:SHOWN]]
        for stall in self.stalls[:SHOWN]:
            lines.append(f"stall: version {stall.version} held up {stall.worker} for {stall.seconds:.3f} s, "
                         f"with {stall.jobs} jobs")  # fmt: skip
        lines += [f"VIOLATION: {one}" for one in self.violations[:SHOWN]]
        if not self.violations:
            lines.append("every promise that can be checked was kept")
        elif (more := len(self.violations) - SHOWN) > 0:
            lines.append(f"and {more:,} more violations")
        return lines


def schedule_of(entries: Iterable[Entry]) -> Schedule:
    """The schedule that entries tell of (`EVENTS`), in any order. All of them are in memory at once, with the tokens of
    their results."""
    seen = _Seen()
    for entry in sorted(entries, key=lambda one: one.at):
        seen.add(entry)
    held = seen.held()
    by_worker: dict[str, list[Held]] = {}
    for one in held:
        by_worker.setdefault(one.worker, []).append(one)
    queued = [one.queued_s for one in held]
    queue = np.percentile(queued, [50, 99, 100]).tolist() if queued else []
    return Schedule(
        dict(zip(("p50", "p99", "largest"), queue, strict=False)),
        {worker: _time_of(worker, attempts) for worker, attempts in sorted(by_worker.items())},
        sorted(seen.stalls(by_worker), key=lambda one: -one.seconds),
        dict(seen.outcomes.most_common()),
        seen.violations(),
    )


def _time_of(worker: str, attempts: list[Held]) -> WorkerTime:
    attempts.sort(key=lambda one: one.start)
    start, until, busy, gaps = attempts[0].start, attempts[0].start, 0.0, []
    for one in attempts:
        if one.start > until:
            gaps.append((until, one.start - until))
            until = one.start
        busy += max(0.0, one.end - until)
        until = max(until, one.end)
    total, span = sum(one.end - one.start for one in attempts), until - start
    busy = min(busy, span)  # a sum of differences of times since 1970 is rounded to a quarter of a microsecond each
    gaps = sorted((gap for gap in gaps if gap[1] >= GAP_S), key=lambda gap: -gap[1])
    return WorkerTime(worker, start, span, busy, total / span if span else 0.0, len(attempts), tuple(gaps))


@dataclass(slots=True)
class _Seen:
    """Entries, sorted by what they are about. Times are by the clocks of those who wrote them."""

    outcomes: Counter[str] = field(default_factory=Counter)
    claims: dict[str, list[Entry]] = field(default_factory=dict)  # by job
    ended: dict[tuple[str, int], float] = field(default_factory=dict)  # the last that was heard of an attempt
    published: dict[tuple[str, int], list[Entry]] = field(default_factory=dict)  # by sample, where Redis said "ok"
    saved: dict[tuple[str, int], list[Entry]] = field(default_factory=dict)
    results: dict[tuple[str, int], list[tuple[float, RolloutResult]]] = field(default_factory=dict)
    loads: list[Entry] = field(default_factory=list)
    gone: dict[str, float] = field(default_factory=dict)  # when a worker's lease ended, by its own clock
    wrong: list[str] = field(default_factory=list)

    def add(self, entry: Entry) -> None:
        what = str(entry.data.get("what", ""))
        self.outcomes[f"{entry.event} {what}".strip()] += 1
        place, attempt = (entry.job_id, entry.sample), (entry.job_id, entry.attempt)
        if entry.event == "attempt":
            self.ended[attempt] = entry.at
            if what == "claimed":
                self.claims.setdefault(entry.job_id, []).append(entry)
            elif what == "published" and entry.data.get("state") == "ok":
                self.published.setdefault(place, []).append(entry)
            elif what == "saved" and entry.data.get("state") == "ok":
                self.saved.setdefault(place, []).append(entry)
        elif entry.event == "weights" and what == "loaded":
            self.loads.append(entry)
        elif entry.event == "worker" and what in ("left", "lease lost"):
            self.gone.setdefault(str(entry.data.get("worker", "")), entry.at)
        elif entry.event == "result":
            self._result(entry)

    def _result(self, entry: Entry) -> None:
        try:
            result = entry.message
        except MessageError as error:
            self.wrong.append(f"the result of {entry.job_id}.{entry.sample} cannot be read: {error}")
            return
        if isinstance(result, RolloutResult):
            self.results.setdefault((entry.job_id, entry.sample), []).append((entry.at, result))

    def held(self) -> list[Held]:
        """Every attempt: from its claim to the last that was heard of it, or from its results' timings."""
        found = {
            (claim.job_id, claim.attempt): Held(
                claim.job_id, claim.attempt, str(claim.data.get("worker", "")), claim.at,
                self.ended[claim.job_id, claim.attempt], _number(claim.data.get("queued_s")), True,
            )
            for claims in self.claims.values() for claim in claims
        }  # fmt: skip
        for (job_id, _), results in self.results.items():
            at, result = results[0]
            took = result.timings.generating + result.timings.waiting
            known = found.get((job_id, result.attempt))
            if known is None:
                found[job_id, result.attempt] = Held(
                    job_id, result.attempt, result.worker_id, at - took, at, result.timings.queued, False
                )
            elif not known.exact:
                known.start, known.end = min(known.start, at - took), max(known.end, at)
        return list(found.values())

    def stalls(self, by_worker: Mapping[str, Sequence[Held]]) -> list[Stall]:
        """Loads under which jobs were held. Receiving a version holds nobody up."""
        found = []
        for load in self.loads:
            worker, seconds = str(load.data.get("worker", "")), _number(load.data.get("load_s"))
            begin = load.at - seconds
            jobs = sum(one.start < load.at and one.end > begin for one in by_worker.get(worker, ()))
            if jobs and seconds > 0:
                found.append(Stall(worker, load.versions[0] if load.versions else -1, load.at, seconds, jobs))
        return found

    def violations(self) -> list[str]:
        """Promises that were broken."""
        return [*self.wrong, *self._of_claims(), *self._of_publications(), *self._of_results(), *self._of_versions()]

    def _of_claims(self) -> Iterable[str]:
        for job_id, claims in self.claims.items():
            owners: dict[int, str] = {}
            for claim in sorted(claims, key=lambda one: one.attempt):
                worker = str(claim.data.get("worker", ""))
                if owners.setdefault(claim.attempt, worker) != worker:
                    yield f"attempt {claim.attempt} of {job_id} was claimed by {owners[claim.attempt]} and by {worker}"
            ordered = sorted(claims, key=lambda one: one.attempt)
            for before, after in itertools.pairwise(ordered):
                if after.at < before.at - _skew(before, after):
                    yield f"attempt {after.attempt} of {job_id} was claimed before attempt {before.attempt}"

    def _of_publications(self) -> Iterable[str]:
        for (job_id, sample), entries in self.published.items():
            name = f"{job_id}.{sample}"
            if len(entries) > 1:
                who = " and ".join(str(one.data.get("worker", "")) for one in entries)
                yield f"{name} was published {len(entries)} times, by {who}"
            for one in entries:
                worker = str(one.data.get("worker", ""))
                if worker in self.gone and one.at > self.gone[worker] + SKEW_S:
                    yield f"{name} was published by {worker} after its lease had ended"
                for claim in self.claims.get(job_id, ()):
                    if claim.attempt > one.attempt and claim.at < one.at - _skew(claim, one):
                        yield f"{name} was published by attempt {one.attempt} after attempt {claim.attempt} had begun"

    def _of_results(self) -> Iterable[str]:
        for (job_id, sample), results in self.results.items():
            name, (_, first) = f"{job_id}.{sample}", results[0]
            for _, other in results[1:]:  # the same result may come again
                if (other.attempt, other.worker_id) != (first.attempt, first.worker_id) or not np.array_equal(
                    other.token_ids, first.token_ids
                ):
                    yield f"{name} came twice, from {first.worker_id} and from {other.worker_id}, with other tokens"
            for claim in self.claims.get(job_id, ()):
                worker = str(claim.data.get("worker", ""))
                if claim.attempt == first.attempt and worker != first.worker_id:
                    yield f"{name} is by {first.worker_id}, but {worker} claimed attempt {claim.attempt}"

    def _of_versions(self) -> Iterable[str]:
        """Of what was saved; a result whose versions decrease cannot be read at all."""
        for (job_id, sample), pieces in self.saved.items():
            newest = -1
            for piece in sorted(pieces, key=lambda one: (one.attempt, one.data.get("start", 0), one.at)):
                if piece.data.get("start") == 0:
                    newest = -1  # it began anew
                if piece.versions and piece.versions[0] < newest:
                    yield f"{job_id}.{sample} went back from version {newest} to {piece.versions[0]}"
                newest = max(newest, *piece.versions, -1)


def _skew(one: Entry, other: Entry) -> float:
    """What clocks may differ by; nothing between entries of one worker."""
    return 0.0 if one.data.get("worker") == other.data.get("worker") else SKEW_S


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
