"""Rollouts of a journal: the list of samples, and one of them token by token, found by the journal's index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.errors import MessageError
from ...messages.journal import Entry, read
from ...messages.model import RolloutResult
from ..journal import FATES, Life, TextOf, as_line, life_of, plain
from ..terminal import printable
from .causes import failed_rows, waiting_row
from .history import History

Place = tuple[str, int]
SHOWN_TOKENS = 8192
SHOWN_PROMPT = 4096
TURNS = 64
FACTS, EVENTS, LONGEST = 40, 200, 400


def rows_of(
    history: History,
    limit: int = 50,
    before: str = "",
    *,
    worker: str = "",
    version: int | None = None,
    outcome: str = "",
) -> dict[str, Any]:
    """Samples, newest first, and where the next page begins. before: what an answer before has as `next`, or a time.

    worker: a part of its name. outcome: trained, dropped, a finish reason, failed for jobs that failed, or waiting for
    those that waited at `before`, the oldest first; "" for all samples.
    """
    if outcome == "waiting":
        return _waiting_rows(history, limit, _place(before)[0])
    if outcome in {"failed", "dead"}:
        return failed_rows(history.recording.failures.values(), limit, _place(before)[0])
    of = history.samples
    at, place = _place(before)
    wanted = history.have.copy()
    if worker:
        names = [number for number, name in enumerate(history.recording.names.texts) if worker in name]
        wanted &= np.isin(of["worker"], names)
    if version is not None:
        wanted &= (of["oldest"] <= version) & (of["newest"] >= version)
    if outcome in {"trained", "dropped"}:
        wanted &= of["fate"] == (1 if outcome == "trained" else 2)
    elif outcome and outcome != "done":
        wanted &= of["finish"] == history.recording.names[outcome]
    wanted &= (of["at"] < at) | ((of["at"] == at) & (np.arange(len(of["at"])) < place))
    rows = np.flatnonzero(wanted)
    rows = rows[np.lexsort((-rows, -of["at"][rows]))][: limit + 1].tolist()
    after = f"{float(of['at'][rows[limit - 1]])!r}~{rows[limit - 1]}" if len(rows) > limit else None
    return {"rows": [row_of(history, row) for row in rows[:limit]], "next": after}


def _place(before: str) -> tuple[float, int]:
    at, _, place = before.partition("~")
    try:
        return float(at), int(place or 0)
    except ValueError:
        return math.inf, 0


def _waiting_rows(history: History, limit: int, t: float) -> dict[str, Any]:
    jobs, texts = history.jobs, history.recording.names.texts
    found = np.flatnonzero(history.waiting(t))
    rows = []
    for row in found[np.argsort(jobs["at"][found], kind="stable")][:limit].tolist():
        at, later, asks = float(jobs["at"][row]), float(jobs["claimed"][row]), texts[jobs["asks"][row]]
        told = f"for a worker that has {asks}" if asks else "for any worker"
        told += ", never claimed" if math.isnan(later) else f", {later - at:.1f} s until it was claimed"
        rows.append(waiting_row(history.job_names[row], at, told, texts[jobs["client"][row]]))
    return {"rows": rows, "next": None, "left": len(found) - len(rows)}


def row_of(history: History, row: int) -> dict[str, Any]:
    """The contract's row of a sample."""
    of, texts = history.samples, history.recording.names.texts
    reward = float(of["reward"][row])
    return {
        "job_id": history.job_names[int(of["job"][row])], "sample": int(of["sample"][row]), "at": float(of["at"][row]),
        "client": texts[of["client"][row]], "worker": texts[of["worker"][row]], "state": "done",
        "tokens": int(of["tokens"][row]), "oldest_version": _version(of["oldest"][row]),
        "newest_version": _version(of["newest"][row]), "reward": None if math.isnan(reward) else reward,
        "fate": FATES[int(of["fate"][row])] or None, "why": texts[of["why"][row]],
        "session": texts[of["session"][row]], "finish_reason": texts[of["finish"][row]],
    }  # fmt: skip


def _version(number: Any) -> int | None:
    return None if number < 0 else int(number)


class Rollouts:
    """Single rollouts of a journal. text_of: a token's text, None without a tokenizer."""

    def __init__(self, folder: str, history: History, text_of: TextOf | None = None) -> None:
        self._folder, self.history, self._text_of = folder, history, text_of

    def one(self, job_id: str, sample: int = 0) -> dict[str, Any] | None:
        """The contract's Rollout; None if the journal does not have the job."""
        life = life_of(job_id, self._read({job_id}))
        return None if life is None else self._told(life, sample)

    def many(self, places: Sequence[Place]) -> list[dict[str, Any]]:
        """Those of several samples, by one reading."""
        entries: dict[str, list[Entry]] = {job_id: [] for job_id, _ in places}
        for entry in self._read(set(entries)):
            entries[entry.job_id].append(entry)
        lives = {job_id: life_of(job_id, some) for job_id, some in entries.items()}
        return [self._told(life, sample) for job_id, sample in places if (life := lives[job_id]) is not None]

    def _read(self, jobs: set[str]) -> Iterator[Entry]:
        return read(self._folder, job=jobs, on_problem=self.history.recording.problem)

    def _told(self, life: Life, sample: int) -> dict[str, Any]:
        if sample not in life.results and life.results:
            sample = min(life.results)
        result = life.sample(sample)
        notes = [*life.notes.get(-1, ()), *life.notes.get(sample, ())]
        told: dict[str, Any] = {
            "job_id": life.job_id, "sample": sample, "samples": max(len(life.results), 1),
            "prompt": self._prompt(result, life), "tokens": [], "legs": [], "in_place": [], "cached_tokens": 0,
            "facts": _facts(life, sample, result),
            "notes": [{"at": it.at} | _cut(plain(dict(it.data))) for it in notes[:EVENTS]],
            "events": _events(life, sample), "turns": [], "verdict": None,
        }  # fmt: skip
        if result is not None:
            told |= {
                "tokens": self._tokens(result, notes), "legs": list(result.legs), "in_place": list(result.in_place),
                "cached_tokens": result.cached_tokens, "turns": self._turns(result),
            }  # fmt: skip
        return told

    def _prompt(self, result: RolloutResult | None, life: Life) -> dict[str, Any]:
        ids = None if result is None else result.prompt_ids
        if ids is None and life.accepted is not None:
            try:
                ids = getattr(life.accepted.message, "token_ids", None)
            except MessageError:
                ids = None
        shown = [] if ids is None else ids[-SHOWN_PROMPT:].tolist()
        return {"ids": shown, "text": None if self._text_of is None else [*map(self._text, shown)]}

    def _text(self, token: int) -> str:
        return printable(self._text_of(token)[:LONGEST], keep="\n\t") if self._text_of is not None else ""

    def _tokens(self, result: RolloutResult, notes: Sequence[Entry]) -> list[dict[str, Any]]:
        ids = result.token_ids[:SHOWN_TOKENS].tolist()
        count = len(ids)
        versions = np.repeat([it.version for it in result.segments], [it.tokens for it in result.segments])[
            :count
        ].tolist()
        logprobs = None if result.logprobs is None else result.logprobs[:count].tolist()
        of = {name: _array(notes, name, len(result.token_ids)) for name in ("mask", "mismatch")}
        legs = np.searchsorted(np.asarray(result.legs, np.int64), np.arange(count), "right").tolist()
        return [
            {
                "id": token, "text": self._text(token) if self._text_of is not None else None, "version": versions[at],
                "logprob": None if logprobs is None or not math.isfinite(logprobs[at]) else logprobs[at],
                "leg": legs[at], **{name: None if some is None else some[at] for name, some in of.items()},
            }
            for at, token in enumerate(ids)
        ]  # fmt: skip

    def _turns(self, result: RolloutResult) -> list[dict[str, Any]]:
        """The session's turns: each one's parent is the longest other turn that its prompt begins with."""
        if not result.session_id:
            return []
        history, of = self.history, self.history.samples
        rows = np.flatnonzero((of["session"] == history.recording.names[result.session_id]) & history.have)
        rows = rows[np.argsort(of["at"][rows], kind="stable")][:TURNS].tolist()
        places = [(history.job_names[int(of["job"][row])], int(of["sample"][row])) for row in rows]
        texts = self._texts_of(places)
        turns = []
        for turn, (row, place) in enumerate(zip(rows, places, strict=True)):
            shown = row_of(history, row)
            parent = _parent(texts, places, turn)
            turns.append(
                {"job_id": place[0], "sample": place[1], "turn": turn, "parent": parent, "tokens": shown["tokens"],
                 "reward": shown["reward"], "version": shown["newest_version"]}
            )  # fmt: skip
        return turns

    def _texts_of(self, places: Sequence[Place]) -> dict[Place, tuple[Any, Any]]:
        """Prompt, and prompt with answer, of these samples."""
        found: dict[Place, tuple[Any, Any]] = {}
        for entry in self._read({job for job, _ in places}):
            if entry.event != "result":
                continue
            try:
                one = entry.message
            except MessageError:
                continue
            if isinstance(one, RolloutResult) and one.prompt_ids is not None:
                whole = np.concatenate([one.prompt_ids, one.token_ids])
                found[entry.job_id, entry.sample] = one.prompt_ids, whole
        return found


def _parent(texts: Mapping[Place, tuple[Any, Any]], places: Sequence[Place], turn: int) -> int | None:
    if places[turn] not in texts:
        return turn - 1 if turn else None
    prompt, best, length = texts[places[turn]][0], None, -1
    for other in range(turn):
        whole = texts.get(places[other], (None, None))[1]
        if whole is not None and length < len(whole) <= len(prompt) and np.array_equal(prompt[: len(whole)], whole):
            best, length = other, len(whole)
    return best


def _array(notes: Sequence[Entry], name: str, length: int) -> list[Any] | None:
    """The newest note of this name that has a number for each token."""
    for entry in reversed(notes):
        value = entry.data.get(name)
        if isinstance(value, np.ndarray) and value.shape == (length,):
            array: npt.NDArray[Any] = value
            return [None if isinstance(one, float) and not math.isfinite(one) else one for one in array.tolist()]
    return None


def _facts(life: Life, sample: int, result: RolloutResult | None) -> dict[str, str]:
    facts: dict[str, Any] = {}
    if result is not None:
        took = result.timings
        facts = {
            "worker": result.worker_id, "attempt": result.attempt, "finish": result.finish_reason,
            "group": result.group_id, "session": result.session_id, "adapter": result.adapter,
            "queued": f"{took.queued:.2f} s", "generating": f"{took.generating:.2f} s",
            "waiting": f"{took.waiting:.2f} s", **result.fingerprint, **plain(dict(result.metadata)),
        }  # fmt: skip
    elif sample in life.results:
        facts = {"problem": "the journal does not have this result's content, or it cannot be read"}
    if life.failure is not None:
        facts |= {name: life.failure.data.get(name) for name in ("outcome", "cause", "error", "host")}
    shown = list(facts.items())[:FACTS]
    return {printable(str(name)[:80]): printable(str(it)[:LONGEST]) for name, it in shown if it not in (None, "")}


def _events(life: Life, sample: int) -> list[dict[str, Any]]:
    some = [life.accepted, life.results.get(sample), life.consumed.get(sample), life.failure]
    entries = [one for one in some if one is not None]
    entries += [one for one in life.events if one.sample in {-1, sample}]
    entries = sorted(entries, key=lambda one: one.at)[:EVENTS]
    return [{"at": one.at, "text": printable(as_line(one)[25 : 25 + LONGEST].strip())} for one in entries]


def _cut(value: Mapping[str, Any]) -> dict[str, Any]:
    """Notes without long lists: tokens have these themselves."""
    return {
        str(name)[:80]: f"[{len(one)} values]" if isinstance(one, list) and len(one) > 16 else one
        if isinstance(one, int | float | bool | None) else printable(str(one)[:LONGEST])
        for name, one in list(value.items())[:FACTS]
    }  # fmt: skip
