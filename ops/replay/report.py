"""The report of a replay: what its verdicts say together, and its worst samples token by token, as plain data."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ..journal import Recorded
from .verdict import BADNESS, LOGPROB_LIMIT, State, Tokens, Verdict, tokens_of

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
BINS = 24
"""Of the differences by position, at most."""
EDGES = 10.0 ** np.arange(-8, 1.5, 0.5)
"""Of the histogram: a difference below the first, or above the last one, is in the outermost bin."""
INFINITE = 1e38
"""Stands for an infinite difference: a token that the replay could not have sampled."""
_STATES: tuple[State, ...] = get_args(State)


def report_of(
    verdicts: Sequence[Verdict],
    about: Mapping[str, str],
    *,
    limit: float = LOGPROB_LIMIT,
    journal: str = "",
    unread: Sequence[str] = (),
    text_of: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """What verdicts say together, for JSON and for the page; texts and lists in it are bounded.

    about: what was compared with what, for people: names and texts, such as the command and the weights. limit: of
    log-probabilities. journal: where the samples come from, for the commands that the report shows. unread: why samples
    that the journal has could not be read; they count as unverified. text_of: a token's text, if a tokenizer is known.
    """
    tokens = tokens_of(verdicts)
    worst = sorted(verdicts, key=_badness, reverse=True)[:LISTED]
    listed = [_row(verdict, journal) for verdict in worst]
    for row, verdict in zip(listed, worst[:SHOWN], strict=False):
        row["detail"] = _detail(verdict)
    reasons = Counter(chain(unread, *(verdict.reasons for verdict in verdicts)))
    told = summary(verdicts, len(unread))
    return {
        "about": {_cut(name): _cut(text, SHOWN_COMMAND) for name, text in about.items()},
        "journal": _cut(journal, SHOWN_COMMAND),
        "samples": told["samples"],
        "states": {state: told[state] for state in _STATES},
        "limits": {"logprob": limit},
        "engines": {
            "recorded": _engines(verdict.recorded.result.fingerprint for verdict in verdicts),
            "replayed": _engines(verdict.engine for verdict in verdicts),
        },
        "unread": len(unread),
        "reasons": [{"reason": _cut(text), "samples": count} for text, count in reasons.most_common(SHOWN_ITEMS)],
        "total": _tally(tokens, verdicts, np.ones(len(tokens.of), np.bool_)),
        "versions": _by_version(tokens, verdicts),
        "workers": _by_worker(tokens, verdicts),
        "histogram": _histogram(np.abs(tokens.gap)),
        "positions": _by_position(tokens),
        "listed": listed,
        "left_out": {
            "of_the_list": len(verdicts) - len(listed),
            "token_by_token": len(verdicts) - min(SHOWN, len(listed)),
        },
        "texts": {} if text_of is None else {token: _cut(text_of(token)) for token in _tokens_of(listed)},
    }


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


def _badness(verdict: Verdict) -> tuple[float, ...]:
    largest = verdict.largest_gap
    return BADNESS[verdict.state], int(verdict.other.sum()), 0.0 if math.isnan(largest) else largest


def _row(verdict: Verdict, journal: str) -> dict[str, Any]:
    recorded, result = verdict.recorded, verdict.recorded.result
    look = ["rolloutmq", "job", result.job_id, *(["--journal", journal] if journal else [])]
    return {
        "name": _cut(recorded.name), "job": _cut(result.job_id), "sample": result.sample, "state": verdict.state,
        "first": verdict.first, "version": verdict.version, "worker": _cut(result.worker_id),
        "attempt": result.attempt, "group": _cut(result.group_id), "client": _cut(recorded.client_id),
        "at": recorded.at, "tokens": len(result.token_ids), "other_tokens": int(verdict.other.sum()),
        "versions": list(result.versions), "largest_gap": _figure(verdict.largest_gap), "finish": result.finish_reason,
        "replayed_finish": _cut(verdict.finish), "reasons": [_cut(text) for text in verdict.reasons[:SHOWN_ITEMS]],
        "notes": _texts(_alone(recorded)), "metadata": _texts(result.metadata),
        "look": _cut(shlex.join(look), SHOWN_COMMAND),
    }  # fmt: skip


def _tally(tokens: Tokens, verdicts: Sequence[Verdict], inside: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Of the samples of these verdicts, and of those of all tokens that are theirs."""
    states = Counter(verdict.state for verdict in verdicts)
    known = tokens.gap[inside & ~np.isnan(tokens.gap)]
    sizes = np.abs(known)
    return {
        "samples": len(verdicts), **{state: states[state] for state in _STATES},
        "first_differences": sum(verdict.first is not None for verdict in verdicts), "tokens": int(inside.sum()),
        "other_tokens": int(tokens.other[inside].sum()), "compared_logprobs": len(known),
        "mean_gap": _figure(known.mean()) if known.size else None,
        "mean_size": _figure(sizes.mean()) if known.size else None,
        "largest_gap": _figure(sizes.max()) if known.size else None,
    }  # fmt: skip


def _by_version(tokens: Tokens, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    rows = []
    for version in np.unique(tokens.version).tolist():
        inside = tokens.version == version
        tally = _tally(tokens, [verdicts[at] for at in np.unique(tokens.of[inside])], inside)
        firsts = sum(verdict.version == version for verdict in verdicts)
        rows.append({"version": version} | tally | {"first_differences": firsts})
    return rows


def _by_worker(tokens: Tokens, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    workers: dict[str, list[int]] = {}
    for at, verdict in enumerate(verdicts):
        workers.setdefault(verdict.recorded.result.worker_id, []).append(at)
    return [
        {"worker": _cut(worker)} | _tally(tokens, [verdicts[at] for at in places], np.isin(tokens.of, places))
        for worker, places in sorted(workers.items())
    ]


def _histogram(sizes: npt.NDArray[np.float64]) -> dict[str, Any]:
    counts = np.bincount(np.searchsorted(EDGES, sizes[sizes > 0], "right"), minlength=len(EDGES) + 1)
    return {
        "edges": [_figure(edge) for edge in EDGES],
        "tokens": counts.tolist(),
        "exactly_equal": int((sizes == 0).sum()),
        "unknown": int(np.isnan(sizes).sum()),
    }


def _by_position(tokens: Tokens) -> list[dict[str, Any]]:
    longest = int(tokens.place.max(initial=-1)) + 1
    width = max(1, math.ceil(longest / BINS))
    known = ~np.isnan(tokens.gap)
    bins, sizes = tokens.place[known] // width, np.abs(tokens.gap[known])
    inside = ((int(at), sizes[bins == at]) for at in np.unique(bins))
    return [
        {
            "start": at * width, "end": min((at + 1) * width, longest), "tokens": len(here),
            "mean": _figure(here.mean()), "largest": _figure(here.max()),
        }
        for at, here in inside
    ]  # fmt: skip


def _detail(verdict: Verdict) -> dict[str, Any]:
    """One sample, token by token: from `start` on, if it is longer than a report shows."""
    recorded, result = verdict.recorded, verdict.recorded.result
    tokens = len(result.token_ids)
    start = min(max(0, (verdict.first or 0) - SHOWN_TOKENS // 2), max(0, tokens - SHOWN_TOKENS))
    here = slice(start, start + SHOWN_TOKENS)
    prompt = recorded.prompt_ids
    other = np.flatnonzero(verdict.other[here])
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


def _engines(fingerprints: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Fingerprints and how many samples have each; those of no known engine are left out."""
    found = Counter(tuple(sorted(one.items())) for one in fingerprints if one)
    return [
        {"samples": count, "fingerprint": _texts(dict(fingerprint))}
        for fingerprint, count in found.most_common(SHOWN_ITEMS)
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
