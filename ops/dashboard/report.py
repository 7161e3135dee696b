"""A run on one screen: what came of it, what it cost, and what went wrong. What a journal does not know is said."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..journal import FATES
from ..terminal import printable, when
from .history import NO_WORKER, History
from .verdict import STALE, reward_fell

WIDTH = 100
BANDS, DEATHS, CAUSES, SLOW, WHYS, ALARMS = 8, 4, 4, 3, 5, 6
"""Lines of each part, so that all of it is one screen."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may have; None for any. Shares are 0 to 1: of consumed samples that were more than four versions old,
    of jobs that failed, of the workers' time in which they held nothing."""

    max_stale_share: float | None = None
    max_failed_share: float | None = None
    max_idle_share: float | None = None
    max_deaths: float | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """data: everything, for programs. broken: a sentence for each limit that the run does not keep."""

    data: Mapping[str, Any]
    broken: Sequence[str]

    def lines(self) -> list[str]:
        """For people: at most 50 lines of WIDTH columns."""
        parts = (_head, _versions, _rewards, _fates, _workers, _failures, _slow, _alarms)
        found = [line for part in parts for line in part(self.data)]
        found += [f"unknown: {line}" for line in self.data["unknown"]]
        found += [f"LIMIT: {line}" for line in self.broken]
        return [part for line in found for part in _wrapped(printable(line))]


def report_of(history: History, limits: Limits | None = None, *, gpus: int = 1) -> Report:
    """The report of a whole run. gpus: of each worker."""
    of, recording, end = history.samples, history.recording, history.ended
    have = history.have
    frame = history.state(end, brief=True)
    flow = frame["flow"]
    stale = history.staleness(-math.inf, math.inf)
    consumed, jobs = sum(stale.values()), int((~np.isnan(history.jobs["at"])).sum())
    ended = flow["done"] + flow["failed"]
    time_of = _worker_time(history)
    samples, present = flow["consumed"], time_of["present_s"]
    data: dict[str, Any] = {
        "journal": history.pool, "began": history.began, "ended": end, "seconds": end - history.began,
        "jobs": jobs, "done": flow["done"], "failed": flow["failed"], "samples": int(have.sum()),
        "tokens": int(of["tokens"][have].sum()), "consumed": flow["consumed"],
        "failed_share": flow["failed"] / ended if ended else None,
        "versions": frame["versions"], "publishes": _publishes(history), "staleness": stale,
        "stale_share": sum(n for k, n in stale.items() if k > STALE) / consumed if consumed else None,
        "reward_fell": reward_fell(history.rewards(end)), "fates": _fates_of(history),
        "workers": len(history.tracks), "stalls": _stalls(history),
        "deaths": [one._asdict() | {"tokens": history.tracks[one.worker].tokens} for one in history.deaths],
        "restarts": len(history.restarts), **time_of,
        "gpu_s_per_1000": 1000 * gpus * present / samples if present is not None and samples else None, "gpus": gpus,
        "failures": frame["failures"], "slow": _slowest(history), "alarms": frame["alarms"],
    }  # fmt: skip
    data["unknown"] = _unknown(history, data)
    data["problems"] = list(recording.problems)
    return Report(data, _broken(data, limits or Limits()))


def _broken(data: Mapping[str, Any], limits: Limits) -> list[str]:
    found = []
    for one in fields(limits):
        most, name = getattr(limits, one.name), one.name.removeprefix("max_")
        has = (len(data[name]) if data["present_s"] is not None else None) if name == "deaths" else data[name]
        if most is not None and (has is None or has > most):
            told = "unknown" if has is None else f"{has:.4g}"
            found.append(f"{name.replace('_', ' ')}: {told}, at most {most:g} is allowed")
    return found


def _publishes(history: History) -> dict[str, Any]:
    states = [state for _, _, state, _ in history.publishes]
    at = sorted(at for at, _, state, _ in history.publishes if state == "ok")
    apart = np.diff(at) if len(at) > 1 else np.zeros(0)
    return {
        "ok": states.count("ok"), "failed": states.count("failed"), "withdrawn": states.count("withdrawn"),
        "apart_s": float(np.median(apart)) if len(apart) else None, "refused": len(history.refusals),
        "last_refusal": history.refusals[-1]._asdict() if history.refusals else None,
    }  # fmt: skip


def _fates_of(history: History) -> dict[str, Any]:
    """What the trainer did with samples: their number, tokens and reward, trained and by the reason of a drop."""
    of, texts = history.samples, history.recording.names.texts
    found: dict[str, Any] = {}
    for fate, name in enumerate(FATES):
        for why in np.unique(of["why"][history.have & (of["fate"] == fate)]).tolist():
            rows = history.have & (of["fate"] == fate) & (of["why"] == why)
            reward = of["reward"][rows & ~np.isnan(of["reward"])]
            tokens = of["tokens"][rows]
            found[f"{name} {texts[why]}".strip() or "not told"] = {
                "samples": int(rows.sum()), "tokens": float(tokens.mean()),
                "tokens_p90": float(np.percentile(tokens, 90)),
                "reward": float(reward.mean()) if len(reward) else None,
            }  # fmt: skip
    return found


def _stalls(history: History) -> dict[str, Any]:
    """How long updates of the weights stopped workers that held samples."""
    found = [(s, name, version) for name, life in history.recording.workers.items() for _, version, s, _ in life.slow]
    seconds, worst = [s for s, *_ in found], max(found, default=None)
    return {
        "count": len(found), "seconds": sum(seconds), "p50": float(np.median(seconds)) if seconds else None,
        "longest": None if worst is None else dict(zip(("seconds", "worker", "version"), worst, strict=True)),
    }  # fmt: skip


def _worker_time(history: History) -> dict[str, Any]:
    """Seconds in which workers were there, and held something; None without their journals."""
    of, present, busy = history.attempts, 0.0, 0.0
    known = {name: it.present for name, it in history.tracks.items() if it.present is not None}
    for name, (begin, end) in known.items():
        rows = np.flatnonzero((of["worker"] == history.recording.names[name]) & ~np.isnan(of["at"]))
        present, busy = present + end - begin, busy + _union(of["at"][rows], of["end"][rows], begin, end)
    if not known:
        return dict.fromkeys(("present_s", "busy_s", "idle_share"))
    return {"present_s": present, "busy_s": busy, "idle_share": 1 - busy / present if present else None}


def _union(starts: npt.NDArray[Any], ends: npt.NDArray[Any], begin: float, end: float) -> float:
    """Seconds that are in any of the spans."""
    order = np.argsort(starts)
    starts, ends = np.clip(starts[order], begin, end), np.clip(ends[order], begin, end)
    reached = np.concatenate([[begin], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return float(np.maximum(0.0, ends - np.maximum(starts, reached)).sum())


def _slowest(history: History) -> dict[str, Any]:
    """How long jobs took from acceptance to their last result, and what the slowest waited for."""
    jobs, of = history.jobs, history.samples
    took = np.where(jobs["ok"] == 1, jobs["end"] - jobs["at"], np.nan)
    known, longest = np.flatnonzero(~np.isnan(took)), []
    for row in known[np.argsort(-took[known])][:SLOW].tolist():
        samples = (of["job"] == row) & history.have
        longest.append({
            "job_id": history.job_names[row], "seconds": float(took[row]),
            "queued": max(0.0, float(jobs["claimed"][row] - jobs["at"][row])),
            "generating": float(of["generating"][samples].max(initial=0.0)),
            "tokens": int(of["tokens"][samples].max(initial=0)),
            "attempts": int((history.attempts["job"] == row).sum()),
        })  # fmt: skip
    p50, p95 = np.percentile(took[known], [50, 95]).tolist() if len(known) else (None, None)
    return {"p50": p50, "p95": p95, "longest": longest}


def _unknown(history: History, data: Mapping[str, Any]) -> list[str]:
    found = [] if history.own else [NO_WORKER]
    if data["consumed"] is None:
        found.append("no client wrote what it consumed: staleness and GPU-seconds for each sample")
    if not any(one["reward"] is not None for one in data["versions"].values()):
        found.append("no reward is noted (client.journal.note, or a feed)")
    if not history.publishes:
        found.append("no publisher wrote here (WeightPublisher(journal=…)): versions are those of samples and workers")
    if history.recording.lost:
        found.append(f"{history.recording.lost:,} entries that the writers dropped")
    if history.recording.unread:
        found.append(f"{history.recording.unread:,} results that cannot be read, or were redacted")
    if problems := history.recording.problems:
        found.append(f"{len(problems)} problems of the files, such as {problems[0]}")
    return found


# --- for people ---


def _wrapped(line: str) -> list[str]:
    """In at most two lines: a cause may be long."""
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, max_lines=2, placeholder=" …") or [""]


def _head(data: Mapping[str, Any]) -> list[str]:
    span = f"{when(data['began'])} to {when(data['ended'])} ({_lasting(data['seconds'])})"
    consumed = "unknown" if data["consumed"] is None else f"{data['consumed']:,}"
    return [
        f"run {data['journal']}",
        f"  {span}, {data['workers']} workers",
        f"  {data['jobs']:,} jobs: {data['done']:,} done, {data['failed']:,} failed; {data['samples']:,} samples, "
        f"{consumed} consumed, {data['tokens']:,} tokens",
    ]


def _versions(data: Mapping[str, Any]) -> list[str]:
    numbers, told = sorted(map(int, data["versions"])), data["publishes"]
    if not numbers:
        return ["versions: none sampled anything"]
    apart = f", one every {_lasting(told['apart_s'])}" if told["apart_s"] is not None else ""
    lines = [
        f"versions {numbers[0]} to {numbers[-1]}: {told['ok']} published, {told['failed']} failed, "
        f"{told['withdrawn']} withdrawn{apart}; refused {told['refused']} times"
    ]
    if (last := told["last_refusal"]) is not None:
        lines.append(f"  last by {last['worker']}, version {last['version']}: {last['error']}")
    return lines


def _rewards(data: Mapping[str, Any]) -> list[str]:
    by_version = {int(number): one for number, one in data["versions"].items()}
    lines = []
    if by_version:
        lines.append(f"  {'version':>15}{'samples':>10}{'reward':>10}{'staleness':>11}{'tokens/sample':>15}")
    for some in np.array_split(sorted(by_version), min(BANDS, max(1, len(by_version)))):
        if len(some):
            rows = [by_version[int(number)] for number in some]
            count = sum(one["samples"] for one in rows)
            name = f"{some[0]}" if len(some) == 1 else f"{some[0]}–{some[-1]}"
            tokens = sum(one["tokens"] for one in rows) / max(1, count)
            means = "".join(
                f"{_figure(_mean(rows, key)):>{width}}" for key, width in (("reward", 10), ("staleness", 11))
            )
            lines.append(f"  {name:>15}{count:>10,}{means}{tokens:>15,.0f}")
    stale = data["stale_share"]
    lines.append(f"stale share: {_share(stale)} of what was consumed was more than {STALE} versions old")
    if (fell := data["reward_fell"]) is not None:
        lines.append(f"  THE REWARD FELL from {fell[1]:.3g} to {fell[2]:.3g} at version {fell[0]}")
    return lines


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [(one[key], one["samples"]) for one in rows if one[key] is not None]
    count = sum(n for _, n in known)
    return sum(value * n for value, n in known) / count if count else None


def _fates(data: Mapping[str, Any]) -> list[str]:
    found = sorted(data["fates"].items(), key=lambda it: -it[1]["samples"])
    if {name for name, _ in found} <= {"not told"}:
        return []
    lines = [f"  {'fate':>20}{'samples':>10}{'share':>8}{'tokens':>9}{'p90':>8}{'reward':>10}"]
    total = max(1, data["samples"])
    for name, one in found[:WHYS]:
        share, reward, p90 = one["samples"] / total, _figure(one["reward"]), one["tokens_p90"]
        lines.append(f"  {name[:20]:>20}{one['samples']:>10,}{share:>8.1%}{one['tokens']:>9,.0f}{p90:>8,.0f}"
                     f"{reward:>10}")  # fmt: skip
    return lines


def _workers(data: Mapping[str, Any]) -> list[str]:
    lines = []
    if data["present_s"] is not None:
        gpu = "unknown" if data["gpu_s_per_1000"] is None else f"{data['gpu_s_per_1000']:,.0f}"
        lines.append(
            f"GPU-seconds for 1,000 consumed samples: {gpu} ({data['gpus']} GPU a worker); "
            f"idle share {_share(data['idle_share'])}"
        )
        lines.append(f"deaths: {len(data['deaths'])}, engine restarts: {data['restarts']}")
    for one in data["deaths"][:DEATHS]:
        cost = "at an unknown cost" if one["tokens"] is None else f"at least {one['tokens']:,.0f} tokens lost"
        lived = "" if one["lived_s"] is None else f", there for {_lasting(one['lived_s'])}"
        lines.append(f"  {when(one['at'])[11:]} {one['worker']}{lived}, {cost}: {one['why']}")
    stalls = data["stalls"]
    if (longest := stalls["longest"]) is not None:
        lines.append(
            f"stalls: {stalls['count']} updates held samples up for {_lasting(stalls['seconds'])} in all, half of them "
            f"below {stalls['p50']:.2f} s"
        )
        lines.append(f"  longest {longest['seconds']:.2f} s: {longest['worker']}, version {longest['version']}")
    return lines


def _failures(data: Mapping[str, Any]) -> list[str]:
    found = data["failures"]
    lines = (
        [f"failed jobs: {data['failed']:,} ({_share(data['failed_share'])}) by {len(found)} causes"] if found else []
    )
    return lines + [f"  {one['count']:>7,}  {one['cause']}" for one in found[:CAUSES]]


def _slow(data: Mapping[str, Any]) -> list[str]:
    slow = data["slow"]
    if slow["p50"] is None:
        return []
    lines = [f"jobs took {_lasting(slow['p50'])} (p50), {_lasting(slow['p95'])} (p95); the slowest:"]
    for one in slow["longest"]:
        tries = f", {one['attempts']} attempts" if one["attempts"] else ""
        lines.append(f"  {_lasting(one['seconds']):>8}  {one['job_id']}: {_lasting(one['queued'])} queued, "
                     f"{_lasting(one['generating'])} generating {one['tokens']:,} tokens{tries}")  # fmt: skip
    return lines


def _alarms(data: Mapping[str, Any]) -> list[str]:
    return [f"{one['severity']}: {one['title']}: {one['evidence']}" for one in data["alarms"][:ALARMS]]


def _lasting(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _share(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
