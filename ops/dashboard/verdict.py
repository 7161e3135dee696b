"""From what is known of a pool at one moment to alarms, and to one sentence: what it is, why, and what to do. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from ...producer.diagnosis import NO_FAULT, Cause, Reason
from .alarms import DOCS, KINDS, Alarm, Kind
from .causes import Group

State = Literal["healthy", "starved", "saturated", "staleness", "syncing", "standing", "broken", "idle"]
SILENT_S = 3.0
"""A Redis that has not answered for so long counts as away."""
WINDOW_S = 900.0
"""What happened lately is what happened in the last 15 minutes."""
STALE, STALE_SHARE = 4, 0.1
"""A tenth of the samples are more than four versions old."""
NEAR = 0.9
BROKEN: frozenset[Cause] = frozenset(
    {"redis-away", "shard-away", "redis-memory", "weights-lost", "restart-loop", "engine-down", "unclaimed"}
)
AGAIN = 3
"""So many deaths, some of them on one host, are no accident."""
WANTING: frozenset[State] = frozenset({"starved", "saturated", "standing"})
"""States that ask for workers. While those that there are keep dying, that comes first."""
_PACE = "Let the trainer publish more often, or bear more staleness (Staleness(eta=…)); remove idle workers."
_OF_SCALE: Mapping[str, tuple[State, str, str]] = {
    "idle": ("idle", "Nothing waits and nothing runs", ""),
    "balanced": ("healthy", "The workers are enough", ""),
    "starting": ("starved", "The trainer waits for workers that start", "Wait."),
    "starved": ("starved", "The trainer waits for the pool", "Add workers, or shorten samples."),
    "saturated": ("saturated", "Every slot is taken", "Add workers, or raise the scaler's limit."),
    "bound by staleness": ("staleness", "The trainer's staleness bounds the pool", _PACE),
    "unclaimed": ("standing", "Jobs wait beside free slots: no worker here can run them", ""),
    "paused": ("standing", "The workers are paused", "`rolloutmq control resume`."),
}


class Died(NamedTuple):
    """A worker that fell silent, or whose lease was lost. lived_s: since it joined, None if nobody knows."""

    at: float
    worker: str
    host: str
    why: str
    lived_s: float | None


class Refusal(NamedTuple):
    """A version that a worker could not take."""

    at: float
    worker: str
    version: int
    error: str


class Rewards(NamedTuple):
    """Of one version: number of samples with a reward, their sum and sum of squares, and when the first one came."""

    n: int
    total: float
    squares: float
    since: float | None = None


@dataclass(frozen=True, slots=True)
class Moment:
    """A pool at one moment, live or as a journal tells it. Times are Unix seconds.

    at: now. over: the run is at its end, of a journal. silent_s, trouble: since when Redis is silent, and why.
    reasons: of the diagnosis. scale: state and sentence of the scaling policy; scale_since: since when, None if
    nobody knows. syncing: the version under way, None for none. deaths, refusals, restarts, stalls: of the last 15
    minutes, and of a journal those before them without such a gap between; all of them if it is over.
    stale: samples by how many versions they were behind. rewards: by version. full: kind of bytes -> share of its
    limit. unclaimed: jobs that nobody ever claimed, and what they ask for. lost_entries: of the journal.
    """

    at: float
    over: bool = False
    silent_s: float = 0.0
    trouble: str = ""
    reasons: Sequence[Reason] = ()
    scale: tuple[str, str] | None = None
    scale_since: float | None = None
    running: int = 0
    syncing: int | None = None
    deaths: Sequence[Died] = ()
    refusals: Sequence[Refusal] = ()
    restarts: Sequence[tuple[float, str]] = ()
    stalls: Sequence[tuple[float, str]] = ()
    failures: Sequence[Group] = ()
    stale: Mapping[int, int] = field(default_factory=dict)
    rewards: Mapping[int, Rewards] = field(default_factory=dict)
    full: Mapping[str, float] = field(default_factory=dict)
    unclaimed: Sequence[tuple[str, int, float]] = ()
    lost_entries: int = 0


def alarms_of(moment: Moment) -> list[Alarm]:
    """What somebody should look at, the worst first."""
    found = [
        *_of_reasons(moment), *_of_workers(moment), *_of_versions(moment), *_of_jobs(moment), *_of_room(moment)
    ]  # fmt: skip
    return sorted(found, key=lambda it: ("error", "warn", "note").index(it.severity))


def frame_of(moment: Moment, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The part of the contract's State that follows from a moment. before: see `verdict_of`."""
    alarms = alarms_of(moment)
    return {
        "at": moment.at, "silent_s": moment.silent_s, "verdict": verdict_of(moment, alarms, before),
        "staleness": {str(k): n for k, n in moment.stale.items() if n},
        "failures": [one.as_data() for one in moment.failures], "alarms": [asdict(one) for one in alarms],
    }  # fmt: skip


def verdict_of(moment: Moment, alarms: Sequence[Alarm], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contract's verdict. before: the one of a moment ago, which says since when a state lasts."""
    state, title, first, since = _state(moment)
    errors = [alarm for alarm in alarms if alarm.severity == "error"]
    if moment.over and errors:
        state, title = "broken", f"The run is over, with {len(errors)} error{'s' * (len(errors) > 1)}"
        since = min((alarm.since for alarm in errors if alarm.since is not None), default=since)
    why = [moment.scale[1]] if moment.scale is not None and moment.scale[1] else []
    why += [f"{alarm.title}: {alarm.evidence}" for alarm in alarms if alarm.severity != "note"][:4]
    if since is None:
        since = before["since"] if before is not None and before["state"] == state else moment.at
    todo = [first, *(f"{alarm.title}: {alarm.text}" for alarm in errors if alarm.text != first)]
    return {
        "state": state,
        "since": since,
        "title": title,
        "why": why,
        "todo": [*filter(None, dict.fromkeys(todo))][:5],
    }


def _state(moment: Moment) -> tuple[State, str, str, float | None]:
    if moment.silent_s > SILENT_S:
        told = ": ".join(filter(None, [f"Redis has not answered for {moment.silent_s:.0f} s", moment.trouble[:300]]))
        return "broken", told, "Start it again, or see what is between.", moment.at - moment.silent_s
    stops = [one for one in moment.reasons if one.stops and one.cause not in NO_FAULT]
    hard = next((one for one in moment.reasons if one.cause in BROKEN), None)
    if hard is not None:
        return "broken", _sentence(hard.found), hard.do, hard.since
    found: tuple[State, str, str, float | None]
    if stops and not moment.running and not moment.over:
        found = "standing", _sentence(stops[0].found), stops[0].do, stops[0].since
    elif moment.over:
        return "idle", "The run is over", "", moment.at
    elif moment.syncing is not None:
        found = "syncing", f"Version {moment.syncing} is on its way to the workers", "Wait.", None
    else:
        known = _OF_SCALE.get(moment.scale[0] if moment.scale else "", ("healthy", "Samples are made", ""))
        found = *known, moment.scale_since
    if found[0] in WANTING and _again(moment.deaths) and not (stops and stops[0].cause != "no-worker"):
        told = f"Workers die again and again: {_who_died(moment.deaths)}"
        return "broken", told, KINDS["workers-die"].text, moment.deaths[0].at
    return found


def _again(deaths: Sequence[Died]) -> bool:
    return len(deaths) >= AGAIN and len({one.host for one in deaths}) < len(deaths)


def _who_died(deaths: Sequence[Died]) -> str:
    hosts, last = Counter(one.host or "an unknown host" for one in deaths).most_common(), deaths[-1]
    told = ", ".join(f"{count} on {host}" for host, count in hosts[:3]) + " …" * (len(hosts) > 3)
    return f"{told}; the last was {last.worker}{', ' * bool(last.why)}{last.why}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _of_reasons(moment: Moment) -> list[Alarm]:
    found = []
    for one in moment.reasons:
        if one.cause in NO_FAULT:
            continue
        severity: Literal["error", "warn"] = "error" if one.stops or one.cause in BROKEN else "warn"
        place = f"{DOCS}#why-does-my-job-not-run"
        told = "Jobs wait" if one.stops else "A fault that nobody has met yet"
        found.append(Alarm(f"why-{one.cause}", severity, f"{told}: {one.cause}", one.since, one.found, one.do, place))
    return found


def _of_workers(moment: Moment) -> list[Alarm]:
    found = []
    if deaths := moment.deaths:
        lived = [one.lived_s for one in deaths if one.lived_s is not None]
        told = _who_died(deaths) + (f"; they were there for {min(lived):.1f} to {max(lived):.1f} s" if lived else "")
        again = _again(deaths)
        title = "Workers die again and again" * again
        found.append(_alarm("workers-die", told, deaths[0].at, title, "error" if again else None))
    if moment.restarts:
        who = sorted({worker for _, worker in moment.restarts})
        told = f"{len(moment.restarts)} times, of {', '.join(who[:3])}"
        found.append(_alarm("engines-die", told, moment.restarts[0][0]))
    if moment.stalls:
        told = ", ".join(worker for _, worker in moment.stalls[:4])
        found.append(_alarm("stalled", told, moment.stalls[0][0]))
    return found


def _of_versions(moment: Moment) -> list[Alarm]:
    found = []
    if refusals := moment.refusals:
        broken = [one for one in refusals if "snapshot" in one.error.casefold()]
        last = (broken or refusals)[-1]
        told = f"{len(refusals)} time{'s' * (len(refusals) > 1)}; {last.worker} at version {last.version}: {last.error}"
        found.append(_alarm("snapshot-broken" if broken else "sync-failed", told, (broken or refusals)[0].at))
    total = sum(moment.stale.values())
    old = sum(count for behind, count in moment.stale.items() if behind > STALE)
    if total and old >= STALE_SHARE * total:
        found.append(_alarm("stale-samples", f"{old} of {total} samples ({old / total:.0%})", None))
    if (fell := reward_fell(moment.rewards)) is not None:
        version, before, after = fell
        title = "The reward changed its sign" if before > 0 > after else "The reward fell"
        told = f"mean {before:.3g} up to version {version - 1}, {after:.3g} from version {version} on"
        found.append(_alarm("reward-fell", told, moment.rewards[version].since, title))
    return found


def _of_jobs(moment: Moment) -> list[Alarm]:
    found = []
    if moment.failures:
        worst = moment.failures[0]
        told = f"{sum(it.count for it in moment.failures)} jobs; most often ({worst.count}): {worst.cause}"
        found.append(_alarm("jobs-fail", told, min(it.first for it in moment.failures)))
    for asks, count, since in moment.unclaimed:
        told = f"{count} jobs that ask for {asks}" if asks else f"{count} jobs"
        found.append(_alarm("never-claimed", told, since))
    return found


def _of_room(moment: Moment) -> list[Alarm]:
    found = [
        _alarm("redis-memory" if kind == "Redis" else "near-cap", f"{kind}: {share:.0%} of the limit", None)
        for kind, share in moment.full.items()
        if share >= NEAR
    ]
    if moment.lost_entries:
        found.append(_alarm("journal-lost", f"{moment.lost_entries:,} entries", None))
    return found


def _alarm(
    kind: Kind, evidence: str, since: float | None, title: str = "", severity: Literal["error", "warn"] | None = None
) -> Alarm:
    usual = KINDS[kind]
    return Alarm(kind, severity or usual.severity, title or usual.title, since, evidence, usual.text, usual.doc)


LEAST, SURE = 24, 6.0
"""So many samples with a reward are needed on either side, and a difference of so many standard errors."""


def reward_fell(rewards: Mapping[int, Rewards]) -> tuple[int, float, float] | None:
    """The version from which on the mean reward is lower than before, and both means; None if it did not fall.

    The split that is surest counts, by Welch's t. Two versions are needed on either side: one may be an outlier.
    """
    versions = sorted(rewards)
    best: tuple[float, int, float, float] | None = None
    for place in range(2, len(versions) - 1):
        one, other = (_sum(rewards, part) for part in (versions[:place], versions[place:]))
        if min(one.n, other.n) < LEAST:
            continue
        before, after, first = (it.total / it.n for it in (one, other, rewards[versions[place]]))
        if first > (before + after) / 2:
            continue  # this version was still good
        error = math.sqrt(_variance(one) / one.n + _variance(other) / other.n)
        sure = (before - after) / max(error, 1e-9 + 1e-3 * abs(before))
        if sure >= SURE and (best is None or sure > best[0]):
            best = sure, versions[place], before, after
    return None if best is None else best[1:]


def _sum(rewards: Mapping[int, Rewards], versions: Sequence[int]) -> Rewards:
    n, total, squares = (sum(rewards[it][at] or 0 for it in versions) for at in range(3))
    return Rewards(int(n), total, squares)


def _variance(of: Rewards) -> float:
    return max(0.0, of.squares / of.n - (of.total / of.n) ** 2)
