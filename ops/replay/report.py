"""The report of a replay: what its verdicts say together, and its worst samples token by token, as plain data."""

from __future__ import annotations

import heapq
import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from .recorded import Recorded
from .verdict import Limits, State, Verdict

SHOWN = 50
"""So many samples, the worst ones, are in a report token by token."""
LISTED = 1000
"""So many samples, the worst ones, are listed."""
SHOWN_TOKENS = 4096
"""Of a sample that is longer the tokens around the first that differs are in the report."""
SHOWN_PROMPT = 2048
"""Of a longer prompt its last tokens are in the report."""
SHOWN_TEXT = 200
"""Characters of any text in a report: a token, a note, a reason."""
SHOWN_COMMAND = 4096
"""Characters of a command, or of what was compared."""
SHOWN_ITEMS = 64
"""Notes, reasons, fingerprints."""
BINS = 60
"""Of the differences by position, at most."""
EDGES = 10.0 ** np.arange(-8, 1.5, 0.5)
"""Of the histogram: a difference below the first, or above the last one, is in the outermost bin."""
INFINITE = 1e38
"""Stands for an infinite difference: a token that the replay could not have sampled."""
_STATES: tuple[State, ...] = get_args(State)
_BADNESS = {"same": 0, "unverified": 1, "differs": 2}


_Fingerprint = tuple[tuple[str, str], ...]


class Report:
    """What verdicts say together. They are added one by one; memory is that of the worst samples.

    about: what was compared with what, for people: names and texts, such as the command and the weights. limits: those
    of the verdicts. journal: where the samples come from, for the commands that the report shows.
    """

    def __init__(
        self,
        about: Mapping[str, str],
        *,
        limits: Limits | None = None,
        journal: str = "",
    ) -> None:
        self.about = {_cut(name): _cut(text, SHOWN_COMMAND) for name, text in about.items()}
        self.limits, self.journal = limits or Limits(), journal
        self.states: Counter[State] = Counter()
        self.unread = 0
        self._versions: dict[int, _Tally] = {}
        self._workers: dict[str, _Tally] = {}
        self._all = _Tally()
        self._recorded: Counter[_Fingerprint] = Counter()
        self._replayed: Counter[_Fingerprint] = Counter()
        self._reasons: Counter[str] = Counter()
        self._histogram = np.zeros(len(EDGES) + 1, np.int64)
        self._exact = self._unknown = 0
        self._positions = np.zeros((3, 0))  # tokens, sum, largest
        self._shown, self._listed = _Worst(SHOWN), _Worst(LISTED)

    @property
    def samples(self) -> int:
        """How many were added, unread ones among them."""
        return self.states.total()

    @property
    def unproved(self) -> float:
        """The share of samples that differ or are unverified, from 0 to 1. Without samples nothing is proved: 1."""
        return 1 - self.states["same"] / self.samples if self.samples else 1.0

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        recorded, gaps = verdict.recorded, verdict.gaps
        sizes, known = np.abs(gaps), ~np.isnan(gaps)
        other = _other(verdict)
        self.states[verdict.state] += 1
        for span in recorded.spans():
            tally = self._versions.setdefault(span.version, _Tally())
            inside = slice(span.start, span.end)
            first = verdict.first is not None and span.start <= verdict.first < span.end
            tally.add(verdict.state, gaps[inside], other[inside], first)
        by_worker = self._workers.setdefault(recorded.result.worker_id, _Tally())
        for tally in (by_worker, self._all):
            tally.add(verdict.state, gaps, other, verdict.first is not None)
        self._recorded[tuple(sorted(recorded.result.fingerprint.items()))] += 1
        self._replayed[tuple(sorted(verdict.engine.items()))] += 1
        self._reasons.update(verdict.reasons)
        self._unknown += int((~known).sum())
        self._exact += int((sizes[known] == 0).sum())
        above = sizes[known & (sizes > 0)]
        self._histogram += np.bincount(np.searchsorted(EDGES, above, "right"), minlength=len(EDGES) + 1)
        self._place(sizes, known)
        largest = verdict.largest_gap
        bad = (_BADNESS[verdict.state], int(other.sum()), 0.0 if math.isnan(largest) else largest)
        self._shown.add(bad, lambda: verdict)
        self._listed.add(bad, lambda: self._row(verdict, other))

    def add_unread(self, why: str) -> None:
        """Count a sample that the journal has, and that cannot be read, as unverified."""
        self.unread += 1
        self.states["unverified"] += 1
        self._reasons[why] += 1

    def as_data(self, text_of: Callable[[int], str] | None = None) -> dict[str, Any]:
        """Everything, for JSON and for the page. text_of: a token's text, if a tokenizer is known."""
        listed, shown = self._listed.sorted(), self._shown.sorted()
        verdicts = self.samples - self.unread
        for row, verdict in zip(listed, shown, strict=False):
            row["detail"] = _detail(verdict)
        return {
            "about": self.about,
            "journal": _cut(self.journal, SHOWN_COMMAND),
            "samples": self.samples,
            "states": {state: self.states[state] for state in _STATES},
            "unproved": self.unproved,
            "limits": {"logprob": self.limits.logprob},
            "engines": {"recorded": _engines(self._recorded), "replayed": _engines(self._replayed)},
            "unread": self.unread,
            "reasons": [
                {"reason": _cut(text), "samples": count} for text, count in self._reasons.most_common(SHOWN_ITEMS)
            ],
            "total": self._all.as_data(),
            "versions": [{"version": it} | tally.as_data() for it, tally in sorted(self._versions.items())],
            "workers": [{"worker": _cut(it)} | tally.as_data() for it, tally in sorted(self._workers.items())],
            "histogram": {
                "edges": [_figure(edge) for edge in EDGES],
                "tokens": self._histogram.tolist(),
                "exactly_equal": self._exact,
                "unknown": self._unknown,
            },
            "positions": self._by_position(),
            "listed": listed,
            "left_out": {"of_the_list": verdicts - len(listed), "token_by_token": verdicts - len(shown)},
            "texts": {} if text_of is None else {token: _cut(text_of(token)) for token in _tokens_of(listed)},
        }

    def _row(self, verdict: Verdict, other: npt.NDArray[np.bool_]) -> dict[str, Any]:
        recorded, result = verdict.recorded, verdict.recorded.result
        look = ["rolloutmq", "job", result.job_id, *(["--journal", self.journal] if self.journal else [])]
        return {
            "name": _cut(recorded.name), "job": _cut(result.job_id), "sample": result.sample, "state": verdict.state,
            "first": verdict.first, "version": verdict.version, "worker": _cut(result.worker_id),
            "attempt": result.attempt, "group": _cut(result.group_id), "client": _cut(recorded.client_id),
            "at": recorded.at, "tokens": len(result.token_ids), "other_tokens": int(other.sum()),
            "versions": sorted({span.version for span in recorded.spans()}),
            "largest_gap": _figure(verdict.largest_gap), "finish": result.finish_reason,
            "replayed_finish": _cut(verdict.finish), "reasons": [_cut(text) for text in verdict.reasons[:SHOWN_ITEMS]],
            "notes": _texts(_alone(recorded)), "extra": _texts(verdict.extra), "metadata": _texts(result.metadata),
            "look": _cut(shlex.join(look), SHOWN_COMMAND),
        }  # fmt: skip

    def _place(self, sizes: npt.NDArray[np.float32], known: npt.NDArray[np.bool_]) -> None:
        missing = len(sizes) - self._positions.shape[1]
        if missing > 0:
            self._positions = np.pad(self._positions, ((0, 0), (0, missing)))
        tokens, total, largest = self._positions[:, : len(sizes)]
        here = np.where(known, sizes, 0.0)
        tokens += known
        total += here
        np.maximum(largest, here, out=largest)

    def _by_position(self) -> list[dict[str, Any]]:
        tokens, total, largest = self._positions
        width = max(1, math.ceil(len(tokens) / BINS))
        bins = (slice(start, min(start + width, len(tokens))) for start in range(0, len(tokens), width))
        return [
            {
                "start": at.start, "end": at.stop, "tokens": int(tokens[at].sum()),
                "mean": _figure(total[at].sum() / tokens[at].sum()), "largest": _figure(largest[at].max()),
            }
            for at in bins
            if tokens[at].any()
        ]  # fmt: skip


@dataclass(slots=True)
class _Tally:
    """Of the samples, or the parts of samples, of one version or worker."""

    states: Counter[State] = field(default_factory=Counter)
    tokens: int = 0
    known: int = 0
    other: int = 0
    firsts: int = 0
    total: float = 0.0
    total_size: float = 0.0
    largest: float = 0.0

    def add(self, state: State, gaps: npt.NDArray[np.float32], other: npt.NDArray[np.bool_], first: bool) -> None:
        known = gaps[~np.isnan(gaps)].astype(np.float64)
        self.states[state] += 1
        self.tokens += len(gaps)
        self.known += len(known)
        self.other += int(other.sum())
        self.firsts += first
        self.total += float(known.sum())
        self.total_size += float(np.abs(known).sum())
        self.largest = max(self.largest, float(np.abs(known).max(initial=0.0)))

    def as_data(self) -> dict[str, Any]:
        mean = (self.total / self.known, self.total_size / self.known) if self.known else (math.nan, math.nan)
        return {
            "samples": self.states.total(), **{state: self.states[state] for state in _STATES},
            "first_differences": self.firsts, "tokens": self.tokens, "other_tokens": self.other,
            "compared_logprobs": self.known, "mean_gap": _figure(mean[0]), "mean_size": _figure(mean[1]),
            "largest_gap": _figure(self.largest) if self.known else None,
        }  # fmt: skip


class _Worst:
    """The `most` worst things of many."""

    def __init__(self, most: int) -> None:
        self._most, self._added = most, 0
        self._heap: list[tuple[tuple[float, ...], int, Any]] = []

    def add(self, badness: tuple[float, ...], make: Callable[[], Any]) -> None:
        """make: is called if the thing is kept for now."""
        self._added += 1
        place = (badness, -self._added)  # of equally bad ones the first stay
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, (*place, make()))
        elif place > self._heap[0][:2]:
            heapq.heapreplace(self._heap, (*place, make()))

    def sorted(self) -> list[Any]:
        """The worst one first."""
        return [thing for *_, thing in sorted(self._heap, key=lambda one: one[:2], reverse=True)]


def _other(verdict: Verdict) -> npt.NDArray[np.bool_]:
    """(t,) whether another token was generated."""
    return np.asarray((verdict.token_ids >= 0) & (verdict.token_ids != verdict.recorded.result.token_ids))


def _detail(verdict: Verdict) -> dict[str, Any]:
    """One sample, token by token: from `start` on, if it is longer than a report shows."""
    recorded, result = verdict.recorded, verdict.recorded.result
    tokens = len(result.token_ids)
    start = min(max(0, (verdict.first or 0) - SHOWN_TOKENS // 2), max(0, tokens - SHOWN_TOKENS))
    here = slice(start, start + SHOWN_TOKENS)
    prompt = recorded.prompt_ids
    other = np.flatnonzero(_other(verdict)[here])
    return {
        "start": start,
        "first": verdict.first,
        "left_out": tokens - len(result.token_ids[here]),
        "ids": result.token_ids[here].tolist(),
        "replayed": {int(place): int(verdict.token_ids[here][place]) for place in other},
        "logprobs": None if result.logprobs is None else _figures(result.logprobs[here]),
        "gaps": _figures(verdict.gaps[here]),
        "entropy": None if (found := _entropy(recorded)) is None else _figures(found[here]),
        "spans": [list(span) for span in recorded.spans()],
        "legs": list(result.legs),
        "in_place": list(result.in_place),
        "of_each_token": {_cut(name): values[here] for name, values in _of_each_token(recorded)},
        "prompt": None if prompt is None else prompt[-SHOWN_PROMPT:].tolist(),
        "prompt_left_out": 0 if prompt is None else max(0, len(prompt) - SHOWN_PROMPT),
    }


def _entropy(recorded: Recorded) -> npt.NDArray[np.float32] | None:
    """(t,) float32, in nats: at least so much, as all tokens that are not among the top ones count as one."""
    top = recorded.result.token_arrays.get("top_logprobs")
    if top is None or top.ndim != 2 or not top.shape[1]:
        return None
    with np.errstate(all="ignore"):
        logs = np.asarray(top, np.float64)
        shares = np.exp(logs)
        rest = np.clip(1 - np.nansum(shares, axis=1), 1e-12, 1)
        found = -np.nansum(np.where(shares > 0, shares * logs, 0.0), axis=1) - rest * np.log(rest)
    return np.asarray(found, np.float32)


def _of_each_token(recorded: Recorded) -> Iterable[tuple[str, list[Any]]]:
    """Notes with a number for each token: masks, advantages."""
    tokens = len(recorded.result.token_ids)
    for name, value in list(recorded.notes.items())[:SHOWN_ITEMS]:
        if tokens and _is_of_each_token(value, tokens):
            numbers = value.tolist() if isinstance(value, np.ndarray) else value
            yield name, [None if one is None else _figure(float(one)) for one in numbers]


def _is_of_each_token(value: Any, tokens: int) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.shape == (tokens,))
    return (
        isinstance(value, list)
        and len(value) == tokens
        and all(one is None or (isinstance(one, int | float) and abs(one) < 1e300) for one in value)
    )


def _alone(recorded: Recorded) -> dict[str, Any]:
    """Notes about the sample as a whole."""
    tokens = len(recorded.result.token_ids)
    return {name: value for name, value in recorded.notes.items() if not _is_of_each_token(value, tokens)}


def _tokens_of(listed: Iterable[dict[str, Any]]) -> Iterable[int]:
    """Every token id that is shown, once."""
    found: set[int] = set()
    for row in listed:
        if detail := row.get("detail"):
            found.update(detail["ids"], detail["replayed"].values(), detail["prompt"] or ())
    return sorted(found)


def _engines(found: Counter[_Fingerprint]) -> list[dict[str, Any]]:
    """Fingerprints and how many samples have each; those of no known engine are left out."""
    return [
        {"samples": count, "fingerprint": _texts(dict(fingerprint))}
        for fingerprint, count in found.most_common(SHOWN_ITEMS)
        if fingerprint
    ]


def _texts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values: numbers as they are, anything else as a text."""
    kept = list(given.items())[:SHOWN_ITEMS]
    return {_cut(str(name)): _plain(value) for name, value in kept}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float | np.integer | np.floating):
        return _figure(float(value)) if isinstance(value, float | np.floating) else int(value)
    return _cut(str(value)) if isinstance(value, str) else _cut(str(value)[: SHOWN_TEXT + 1])


def _cut(text: str, most: int = SHOWN_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _figures(values: npt.NDArray[Any]) -> list[float | None]:
    return [_figure(value) for value in values.tolist()]


def _figure(value: float) -> float | None:
    """Five digits; None for NaN. JSON has no word for infinity either: INFINITE is written instead."""
    return None if math.isnan(value) else float(f"{min(max(value, -INFINITE), INFINITE):.5g}")
