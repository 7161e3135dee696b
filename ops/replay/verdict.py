"""The verdict on one sample: the same, different from a token on, or not verified, with the reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..journal import Recorded

State = Literal["same", "differs", "unverified"]
"""same: every token, and every log-probability within the limit. differs: at least one is not. unverified: nothing was
proved, for the reasons given. It is never taken for "same"."""


BADNESS = {"same": 0, "unverified": 1, "differs": 2}
LOGPROB_LIMIT = 1e-5
"""The largest difference between two log-probabilities that counts as none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay found out about one sample. t is the number of tokens of the recorded sample.

    token_ids: (t,) int32, what was generated at each place; -1 where nothing was. Behind the first token of a span that
    differs, the rest of that span is what the replay went on with, and proves nothing. A score, which generates
    nothing, has the recorded tokens.
    logprobs: (t,) float32, of the *recorded* token at each place by the replay; NaN where it is not known.
    first: the first place whose token or log-probability differs; None without one.
    finish: how the replay ended: its finish reason; "" if that was not replayed.
    reasons: why the sample is unverified, or what may explain the difference, a sentence each.
    engine: the fingerprint of the engine that replayed it, as far as it is known.
    """

    recorded: Recorded
    state: State
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    first: int | None = None
    finish: str = ""
    reasons: tuple[str, ...] = ()
    engine: Mapping[str, str] = field(default_factory=dict)

    @property
    def gaps(self) -> npt.NDArray[np.float32]:
        """(t,) float32: replayed minus recorded log-probability; NaN where one of them is not known."""
        before = self.recorded.result.logprobs
        if before is None:
            return np.full(len(self.logprobs), np.nan, np.float32)
        return np.asarray(self.logprobs - before, np.float32)

    @property
    def other(self) -> npt.NDArray[np.bool_]:
        """(t,) whether another token was generated."""
        return np.asarray((self.token_ids >= 0) & (self.token_ids != self.recorded.result.token_ids))

    @property
    def largest_gap(self) -> float:
        """The largest absolute gap; NaN if none is known."""
        gaps = np.abs(self.gaps)
        return float(np.nanmax(gaps)) if gaps.size and not np.isnan(gaps).all() else float("nan")

    @property
    def version(self) -> int | None:
        """The weights that sampled the first token that differs; None if none does."""
        if self.first is None:
            return None
        return next((span.version for span in self.recorded.spans() if span.start <= self.first < span.end), None)

    def as_data(self) -> dict[str, Any]:
        """For JSON; without the arrays."""
        result = self.recorded.result
        return {
            "sample": self.recorded.name, "state": self.state, "tokens": len(result.token_ids),
            "versions": list(result.versions), "worker": result.worker_id, "first": self.first, "version": self.version,
            "largest_gap": None if math.isnan(self.largest_gap) else self.largest_gap, "reasons": list(self.reasons),
        }  # fmt: skip

    def line(self) -> str:
        """For people."""
        result = self.recorded.result
        versions = ",".join(map(str, result.versions)) or "none"
        line = f"{self.state:<10} {self.recorded.name}  {len(result.token_ids)} tokens, versions {versions}"
        if self.first is not None:
            line += f"; differs from token {self.first} (version {self.version}) on"
        if not math.isnan(self.largest_gap):
            line += f"; log-probabilities within {self.largest_gap:.2g}"
        return "; ".join([line, *self.reasons])


def compared(
    recorded: Recorded,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    limit: float = LOGPROB_LIMIT,
    *,
    replayed: npt.NDArray[np.bool_] | None = None,
    finish: str = "",
    reasons: Sequence[str] = (),
    differences: Sequence[str] = (),
    unproved: Iterable[str] = (),
    engine: Mapping[str, str] | None = None,
) -> Verdict:
    """The verdict from what was replayed; the arrays and the engine are those of `Verdict`.

    limit: the largest difference of a log-probability that counts as none.
    replayed: (t,) whether a place was replayed at all; None for all of them. Only these are compared. finish: is
    compared with the recorded one unless it is "". differences: what else is not as recorded, a sentence each.
    unproved: reasons that make a sample without differences unverified, because a part of it was not replayed.
    """
    before = recorded.result
    differs = token_ids != before.token_ids
    if before.logprobs is not None:
        differs = differs | ~(np.abs(logprobs - before.logprobs) <= limit)  # NaN is within no limit
    places = np.flatnonzero(differs if replayed is None else differs & replayed)
    first = int(places[0]) if places.size else None
    missing, told = tuple(unproved), [*reasons, *differences]
    if finish and finish != before.finish_reason:
        told.append(f"the replay ended with {finish!r}, the recorded sample with {before.finish_reason!r}")
        state: State = "differs"
    elif first is not None or differences:
        state = "differs"
    else:
        state = "unverified" if missing else "same"
    return Verdict(recorded, state, token_ids, logprobs, first, finish, (*told, *missing), engine or {})


def unverified(recorded: Recorded, *reasons: str) -> Verdict:
    """Nothing could be replayed."""
    tokens = len(recorded.result.token_ids)
    return Verdict(
        recorded, "unverified", np.full(tokens, -1, np.int32), np.full(tokens, np.nan, np.float32), reasons=reasons
    )


class Tokens(NamedTuple):
    """The tokens of several verdicts, one behind the other. Each array is (n,).

    of: the place of the token's verdict. place: the token's in its sample. gap, other: as `Verdict` has them.
    """

    of: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    version: npt.NDArray[np.int64]
    gap: npt.NDArray[np.float64]
    other: npt.NDArray[np.bool_]


def tokens_of(verdicts: Sequence[Verdict]) -> Tokens:
    """All tokens of these verdicts."""
    sizes = [len(one.token_ids) for one in verdicts]
    spans = [span for one in verdicts for span in one.recorded.spans()]
    versions = np.array([span.version for span in spans], np.int64)
    return Tokens(
        np.repeat(np.arange(len(sizes)), sizes),
        np.concatenate([np.zeros(0, np.int64), *map(np.arange, sizes)]),
        np.repeat(versions, [span.end - span.start for span in spans]),
        np.concatenate([np.zeros(0), *(one.gaps for one in verdicts)]),
        np.concatenate([np.zeros(0, np.bool_), *(one.other for one in verdicts)]),
    )
