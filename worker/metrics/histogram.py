"""Counts of values by their size, as Prometheus shows them. Plain numbers, so that counting needs no library."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

SYNC_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Seconds of a weight transfer."""


def finite(value: float) -> float:
    """The value, or 0 for what is no amount: what others say may be NaN, infinite or negative."""
    return value if math.isfinite(value) and value >= 0 else 0.0


class Histogram:
    """Counts values. bounds: the buckets' upper ends, ascending; one more bucket has what is above the last.

    counts: values per bucket. total: their sum.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int]) -> None:
        """Count what another histogram of the same bounds has counted. The values above the last bound count as it."""
        for bucket, count in enumerate(counts[: len(self.counts)]):
            self.counts[bucket] += count
            self.total += count * self.bounds[min(bucket, len(self.bounds) - 1)]

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, how many values are at most that), as Prometheus' client takes them."""
        found, below = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found
