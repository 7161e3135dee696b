"""Where log-probabilities differ: by version, worker, position and prefix cache, and what that says is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import Settings, Verdict, tokens_of
from .score import is_exact

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


class _Known(NamedTuple):
    """The tokens whose gap is known. Each array is (n,); the gaps are absolute."""

    gap: npt.NDArray[np.float64]
    exact: npt.NDArray[np.bool_]
    version: npt.NDArray[np.int64]
    worker: npt.NDArray[np.str_]
    position: npt.NDArray[np.int64]
    cached: npt.NDArray[np.bool_]
    settings: Settings

    def spread(self, chosen: npt.NDArray[np.bool_]) -> Spread:
        gaps, exact = self.gap[chosen], self.exact[chosen]
        wrong = bool((gaps[exact] > self.settings.score_limit).any())
        wrong = wrong or bool((~exact).any() and gaps[~exact].mean() > self.settings.mean_limit)
        p50, p99 = np.percentile(gaps, [50, 99])
        return Spread(len(gaps), float(gaps.mean()), float(p50), float(p99), float(gaps.max()), wrong)

    def by(self, column: npt.NDArray[Any], name: Callable[[Any], Any]) -> dict[Any, Spread]:
        return {name(value): self.spread(column == value) for value in np.unique(column)}


def gaps_of(verdicts: Sequence[Verdict], settings: Settings) -> Gaps:
    """What the verdicts of `score` say together. settings: with the limits that `score` had."""
    states = Counter[str](verdict.state for verdict in verdicts)
    reasons = Counter(chain(*(verdict.reasons for verdict in verdicts if verdict.state == "unverified")))
    common = dict(states.most_common()), dict(reasons.most_common())
    tokens = _known(verdicts, settings)
    if not len(tokens.gap):
        return Gaps(*common, None, {}, {}, {}, {}, ())
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


def _known(verdicts: Sequence[Verdict], settings: Settings) -> _Known:
    """A result names the worker that sampled its last tokens; what an earlier attempt had left is by whoever had that
    attempt."""
    tokens, samples = tokens_of(verdicts), [verdict.recorded for verdict in verdicts]
    here = ~np.isnan(tokens.gap)
    of, place = tokens.of[here], tokens.place[here]
    results = [one.result for one in samples]
    first = np.array([one.legs[-1] if one.attempt > 1 and one.legs else 0 for one in results], np.int64)
    workers = np.array([one.worker_id for one in results], np.str_)
    prompts = np.array([0 if one.prompt_ids is None else one.prompt_ids.size for one in samples], np.int64)
    return _Known(
        np.abs(tokens.gap[here]),
        np.array([is_exact(verdict.recorded, verdict.engine) for verdict in verdicts], np.bool_)[of],
        tokens.version[here],
        np.where(place < first[of], UNKNOWN, workers[of]),
        prompts[of] + place,
        np.array([one.cached_tokens > 0 for one in results], np.bool_)[of],
        settings,
    )


def _findings(tokens: _Known, bins: npt.NDArray[np.int64]) -> list[str]:
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


def _where(tokens: _Known, bins: npt.NDArray[np.int64]) -> list[str]:
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
