"""What a sample has generated so far: tokens, their logprobs, and whatever else has one row for each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Generated:
    """token_ids: (n,) int32. logprobs: (n,) float32. rows: named arrays, each (n, …)."""

    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    rows: Rows = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def then(self, more: Generated) -> Generated:
        """This and `more` after it. Both have the same rows, unless one of them has no tokens."""
        if not len(self) or not len(more):
            return self if len(self) else more
        return Generated(
            np.concatenate([self.token_ids, more.token_ids]),
            np.concatenate([self.logprobs, more.logprobs]),
            {name: np.concatenate([rows, more.rows[name]]) for name, rows in self.rows.items()},
        )

    def cut(self, start: int = 0, end: int | None = None) -> Generated:
        """Tokens `start` to `end` (not included; None is the last one)."""
        rows = {name: rows[start:end] for name, rows in self.rows.items()}
        return Generated(self.token_ids[start:end], self.logprobs[start:end], rows)
