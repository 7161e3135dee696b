"""Turns clock readings into the figures of `python -m benchmarks sync`. Nothing here measures anything."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

Span = tuple[float, float]
"""Start and end, in seconds of the monotonic clock that all processes of a host share."""


def span_ms(spans: Sequence[Span]) -> float:
    """Return milliseconds from the first start to the last end."""
    return (max(end for _, end in spans) - min(begin for begin, _ in spans)) * 1e3


def gb_s(nbytes: int, ms: float) -> float:
    """Return decimal gigabytes per second that each receiver got."""
    return nbytes / ms / 1e6


def steps(arrivals: Iterable[Sequence[float]]) -> float:
    """Return median seconds between two tokens of one stream, 0.0 without any two.

    arrivals: of each stream, ascending.
    """
    gaps = [late - early for stream in arrivals for early, late in pairwise(stream)]
    return statistics.median(gaps) if gaps else 0.0


def stall_ms(arrivals: Sequence[Sequence[float]], update: Span, step_s: float, slack_s: float = 0.0) -> float:
    """Return milliseconds that the engine went without a token around an update, less an ordinary step; at least 0.

    It is the longest time between two neighbouring arrivals of all streams together that overlaps the update (and
    `slack_s` seconds after it), less `step_s`. Raises ValueError if there is no token before the update or none after
    it.
    """
    every = sorted(moment for stream in arrivals for moment in stream)
    begin, end = update[0], update[1] + slack_s
    if not every or every[0] > begin or every[-1] < update[1]:
        raise ValueError("no token before the update, or none after it")
    gaps = (late - early for early, late in pairwise(every) if late > begin and early < end)
    return max(0.0, max(gaps, default=0.0) - step_s) * 1e3


def best(rounds: Mapping[str, Sequence[float]], path: str) -> tuple[str, float] | None:
    """Return (variant, median ms) of a path's fastest variant, None without any. Keys are `path` or `path:variant`."""
    medians = {
        key.partition(":")[2]: statistics.median(found)
        for key, found in rounds.items()
        if found and key.partition(":")[0] == path
    }
    return min(medians.items(), key=lambda item: item[1]) if medians else None


def summary(nbytes: int, rounds: Mapping[str, Sequence[float]], paths: Sequence[str]) -> dict[str, Any]:
    """Return `<path>_ms`, `<path>_gb_s` and `<path>_variant` of every path.

    They are None for a path without a round.
    """
    figures: dict[str, Any] = {}
    for path in paths:
        found = best(rounds, path)
        figures[f"{path}_ms"] = round(found[1], 3) if found else None
        figures[f"{path}_gb_s"] = round(gb_s(nbytes, found[1]), 2) if found else None
        figures[f"{path}_variant"] = found[0] if found and found[0] else None
    return figures


def ratios(figures: Mapping[str, Any]) -> dict[str, float | None]:
    """Return ratios of figures within one run."""

    def over(numerator: str, denominator: str) -> float | None:
        above, below = figures.get(numerator), figures.get(denominator)
        return round(above / below, 4) if above is not None and below else None

    stock = [ms for ms in (figures.get("stock_tensor_ms"), figures.get("stock_bucket_ms")) if ms]
    ours, unverified = figures.get("ours_ms"), figures.get("ours_unverified_ms")
    return {
        "ours_of_raw": over("raw_ms", "ours_ms"),
        "ours_over_stock": round(min(stock) / ours, 4) if stock and ours else None,
        "verification_cost": round(ours / unverified - 1, 4) if ours and unverified else None,
    }
