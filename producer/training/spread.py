"""How numbers are spread, in bounded memory: count, mean and extremes are exact, quantiles come from a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from ...messages.arguments import whole_number
from ...messages.errors import InvalidField

KEPT = 512
"""Most values that are kept for quantiles."""


class Spread:
    """A running summary of numbers.

    Every `stride`-th value is kept, and the stride doubles when `KEPT` are kept. So what is kept covers the whole run
    evenly, and the same values in the same order give the same summary.
    """

    def __init__(self) -> None:
        self.count, self.total, self.least, self.most = 0, 0.0, math.inf, -math.inf
        self._stride, self._kept = 1, list[float]()

    def add(self, value: float) -> None:
        """Take in one value. A value that is not finite counts for nothing."""
        if not math.isfinite(value):
            return
        if self.count % self._stride == 0:
            self._kept.append(value)
            if len(self._kept) > KEPT:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        self.count += 1
        self.total += value
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def mean(self) -> float | None:
        """None without values."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value below which `share` (0 to 1) of the kept values lie; None without values."""
        if not self._kept:
            return None
        ordered = sorted(self._kept)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def report(self) -> dict[str, float | int | None]:
        """count, mean, min, p10, p50, p90, max."""
        ends = (self.least, self.most) if self.count else (None, None)
        shares = {f"p{round(share * 100)}": self.quantile(share) for share in (0.1, 0.5, 0.9)}
        return {"count": self.count, "mean": self.mean, "min": ends[0], **shares, "max": ends[1]}

    def state(self) -> dict[str, Any]:
        """Plain data for `of`."""
        ends = [self.least, self.most] if self.count else []
        return {"count": self.count, "total": self.total, "ends": ends, "stride": self._stride, "kept": [*self._kept]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """The summary that `state` came from. Raises InvalidField, or Python's own errors, for anything else."""
        made = cls()
        made.count, made._stride = whole_number("count", state["count"], 0), whole_number("stride", state["stride"], 1)
        ends, made._kept = [float(end) for end in state["ends"]], [float(value) for value in state["kept"]]
        made.total = float(state["total"])
        if len(made._kept) != -(-made.count // made._stride) or len(made._kept) > KEPT:
            raise InvalidField("kept", f"{len(made._kept)} values", f"each {made._stride}th one of {made.count}")
        if len(ends) != (2 if made.count else 0) or not all(map(math.isfinite, [*ends, *made._kept])):
            raise InvalidField("ends", ends, "the least and the largest value, if there is one; all are finite")
        if ends:
            made.least, made.most = ends
        return made
