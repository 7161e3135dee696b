"""Verdicts as lines for people, and as plain data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .verdict import Verdict

ORDER = ("differs", "unverified", "same")
"""Of states, the worst first."""


def as_data(verdict: Verdict) -> dict[str, Any]:
    """A verdict without its arrays."""
    result = verdict.recorded.result
    return {
        "sample": verdict.recorded.name,
        "state": verdict.state,
        "tokens": len(result.token_ids),
        "versions": list(result.versions),
        "worker": result.worker_id,
        "first": verdict.first,
        "version": verdict.version,
        "largest_gap": None if math.isnan(verdict.largest_gap) else verdict.largest_gap,
        "reasons": list(verdict.reasons),
        **verdict.extra,
    }


def as_line(verdict: Verdict) -> str:
    """One line about a sample."""
    data = as_data(verdict)
    versions = ",".join(map(str, data["versions"])) or "none"
    line = f"{verdict.state:<10} {data['sample']}  {data['tokens']} tokens, versions {versions}"
    if verdict.first is not None:
        line += f"; differs from token {verdict.first} (version {verdict.version}) on"
    if data["largest_gap"] is not None:
        line += f"; log-probabilities within {data['largest_gap']:.2g}"
    return "; ".join([line, *verdict.reasons])


def worst_of(verdicts: Sequence[Verdict], most: int) -> list[Verdict]:
    """At most so many of them, in their order: those that differ first, then the unverified."""
    worst = sorted(range(len(verdicts)), key=lambda at: (ORDER.index(verdicts[at].state), at))[:most]
    return [verdicts[at] for at in sorted(worst)]


def summary(verdicts: Sequence[Verdict], unread: int = 0) -> dict[str, Any]:
    """Counts over all samples. unread: results that could not be read; they count as unverified."""
    states = Counter(verdict.state for verdict in verdicts)
    gaps = [verdict.largest_gap for verdict in verdicts if not math.isnan(verdict.largest_gap)]
    return {
        "samples": len(verdicts) + unread,
        "same": states["same"],
        "differs": states["differs"],
        "unverified": states["unverified"] + unread,
        "tokens": sum(len(verdict.recorded.result.token_ids) for verdict in verdicts),
        "largest_gap": max(gaps, default=None),
    }
