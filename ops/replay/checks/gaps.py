"""Where log-probabilities differ: by version, worker, position and prefix cache, and what that says is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import Recorded, Verdict
from .score import Tolerance, is_exact

UNKNOWN = "unknown"
"""The worker of tokens that a sample of several attempts had before its last leg."""
CAUSES = 5
"""So many reasons are shown."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Absolute gaps of tokens, in nats. wrong: whether they are beyond the tolerance."""

    tokens: int
    mean: float
    p50: float
    p99: float
    largest: float
    wrong: bool

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a score found.

    states: number of samples by verdict. reasons: why samples are unverified, the most frequent first. by_version,
    by_worker: gaps of the tokens that each sampled. by_position: by the place in the sequence, prompt included, in bins
    that double. by_cache: by whether the worker had a part of the prompt in its prefix cache. findings: what is wrong,
    a sentence each; empty if nothing is.
    """

    states: Mapping[str, int]
    reasons: Mapping[str, int]
    overall: Spread | None
    by_version: Mapping[int, Spread]
    by_worker: Mapping[str, Spread]
    by_position: Mapping[str, Spread]
    by_cache: Mapping[str, Spread]
    findings: tuple[str, ...]

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        told: dict[str, Any] = {"states": dict(self.states), "reasons": dict(self.reasons)}
        told["overall"] = None if self.overall is None else self.overall.as_data()
        for name in ("by_version", "by_worker", "by_position", "by_cache"):
            told[name] = {str(group): spread.as_data() for group, spread in getattr(self, name).items()}
        return told | {"findings": list(self.findings)}

    def lines(self) -> list[str]:
        """For people."""
        lines = [", ".join(f"{count:,} {state}" for state, count in self.states.items()) or "no samples"]
        for name in ("by_version", "by_worker", "by_position", "by_cache"):
            lines.append(f"{name.replace('_', ' '):24} {'tokens':>9} {'mean':>9} {'p50':>9} {'p99':>9} {'largest':>9}")
            for group, one in getattr(self, name).items():
                figures = f"{one.mean:9.1e} {one.p50:9.1e} {one.p99:9.1e} {one.largest:9.1e}"
                lines.append(f"  {group!s:22} {one.tokens:9,} {figures}{'  <-' if one.wrong else ''}")
        lines += [f"unverified: {why} ({count:,})" for why, count in list(self.reasons.items())[:CAUSES]]
        nothing = "no token is beyond the tolerance" if self.overall is not None else "no token could be scored"
        return lines + (list(self.findings) or [nothing])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """All tokens that were scored. Each array is (n,)."""

    gap: npt.NDArray[np.float64]
    exact: npt.NDArray[np.bool_]
    version: npt.NDArray[np.int64]
    worker: npt.NDArray[np.str_]
    position: npt.NDArray[np.int64]
    cached: npt.NDArray[np.bool_]
    tolerance: Tolerance

    def spread(self, chosen: npt.NDArray[np.bool_]) -> Spread:
        gaps, exact = self.gap[chosen], self.exact[chosen]
        wrong = bool((gaps[exact] > self.tolerance.exact).any())
        wrong = wrong or bool((~exact).any() and gaps[~exact].mean() > self.tolerance.mean)
        p50, p99 = np.percentile(gaps, [50, 99])
        return Spread(len(gaps), float(gaps.mean()), float(p50), float(p99), float(gaps.max()), wrong)

    def by(self, column: npt.NDArray[Any], name: Callable[[Any], Any]) -> dict[Any, Spread]:
        return {name(value): self.spread(column == value) for value in np.unique(column)}


def gaps_of(verdicts: Iterable[Verdict], tolerance: Tolerance, dtype: str = "float32") -> Gaps:
    """What the verdicts of `score` say together. tolerance, dtype: as `score` had them."""
    states, reasons, parts = Counter[str](), Counter[str](), []
    for verdict in verdicts:
        states[verdict.state] += 1
        if verdict.state == "unverified":
            reasons.update(verdict.reasons)
        if (part := _tokens_of(verdict, tolerance, dtype)) is not None:
            parts.append(part)
    common = dict(states.most_common()), dict(reasons.most_common())
    if not parts:
        return Gaps(*common, None, {}, {}, {}, {}, ())
    columns: Any = ("gap", "exact", "version", "worker", "position", "cached")
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in columns}
    tokens = _Tokens(**columns, tolerance=tolerance)
    bins = np.where(tokens.position > 0, np.int64(1) << np.log2(np.maximum(tokens.position, 1)).astype(np.int64), 0)
    return Gaps(
        *common,
        tokens.spread(np.ones(len(tokens.gap), np.bool_)),
        tokens.by(tokens.version, int),
        tokens.by(tokens.worker, str),
        tokens.by(bins, lambda low: f"{low} to {max(2 * low - 1, 0)}"),
        tokens.by(tokens.cached, lambda yes: "prefix cached" if yes else "nothing cached"),
        tuple(_findings(tokens, bins)),
    )


def _tokens_of(verdict: Verdict, tolerance: Tolerance, dtype: str) -> _Tokens | None:
    one, gaps = verdict.recorded, np.abs(verdict.gaps.astype(np.float64))
    known = ~np.isnan(gaps)
    if not known.any():
        return None
    tokens = len(gaps)
    prompt = 0 if one.prompt_ids is None else one.prompt_ids.size
    return _Tokens(
        gaps[known],
        np.full(tokens, is_exact(one, dtype))[known],
        np.repeat([span.version for span in one.spans()], [span.end - span.start for span in one.spans()])[known],
        workers_of(one)[known],
        (prompt + np.arange(tokens))[known],
        np.full(tokens, one.result.cached_tokens > 0)[known],
        tolerance,
    )


def workers_of(one: Recorded) -> npt.NDArray[np.str_]:
    """(t,) the worker that sampled each token. A result names the last one; what an earlier attempt had left is by
    whoever had that attempt."""
    tokens, first = len(one.result.token_ids), 0
    if one.result.attempt > 1 and one.result.legs:
        first = one.result.legs[-1]
    return np.array([UNKNOWN] * first + [one.result.worker_id] * (tokens - first), dtype=np.str_)


def _findings(tokens: _Tokens, bins: npt.NDArray[np.int64]) -> list[str]:
    """What is wrong, the worst worker first."""
    workers = [str(worker) for worker in np.unique(tokens.worker)]
    versions = np.unique(tokens.version)
    wrong: dict[str, list[int]] = {}
    for worker in workers:
        of = tokens.worker == worker
        bad = [int(v) for v in np.unique(tokens.version[of]) if tokens.spread(of & (tokens.version == v)).wrong]
        if bad:
            wrong[worker] = bad
    if not wrong:
        return []
    guilty = np.zeros(len(tokens.gap), np.bool_)
    for worker, bad in wrong.items():
        guilty |= (tokens.worker == worker) & np.isin(tokens.version, bad)
    rest = f"{tokens.gap[~guilty].max():.1e} at most" if (~guilty).any() else "nothing"
    found = []
    if len(wrong) == len(workers) > 1 and len({tuple(bad) for bad in wrong.values()}) == 1:
        when = _when(next(iter(wrong.values())), versions)
        found.append(f"all {len(workers)} workers {when}: largest gap {tokens.gap[guilty].max():.2g}, all else {rest}")
    else:
        for worker, bad in sorted(wrong.items(), key=lambda item: item[1][0]):
            mine = (tokens.worker == worker) & np.isin(tokens.version, bad)
            when = _when(bad, np.unique(tokens.version[tokens.worker == worker]))
            found.append(f"worker {worker} {when}: largest gap {tokens.gap[mine].max():.2g}, everybody else {rest}")
    return found + _where(tokens, bins)


def _when(bad: list[int], sampled: npt.NDArray[np.int64]) -> str:
    """Versions as words. sampled: all versions that there were."""
    if len(bad) == len(sampled) > 1:
        return f"in all its versions, {bad[0]} to {bad[-1]}"
    if len(bad) > 1 and bad == [int(version) for version in sampled if version >= bad[0]]:
        return f"from version {bad[0]} on"
    return f"in version{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"


def _where(tokens: _Tokens, bins: npt.NDArray[np.int64]) -> list[str]:
    """Whether the gaps have to do with the position or with the prefix cache."""
    found = []
    by_bin = {int(low): tokens.spread(bins == low) for low in np.unique(bins)}
    first = next((low for low, spread in by_bin.items() if spread.wrong), None)
    if first is not None and first != min(by_bin) and all(one.wrong for low, one in by_bin.items() if low >= first):
        found.append(f"only from position {first} on: positions may be encoded otherwise, as by another rope scaling")
    cached = tokens.cached
    if cached.any() and not cached.all() and tokens.spread(cached).wrong and not tokens.spread(~cached).wrong:
        found.append("only in samples whose prompt was in the prefix cache: it may be stale")
    return found
