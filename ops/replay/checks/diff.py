"""Two runs' journals beside each other: are they one run, and if not, where do they part?"""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....messages.errors import ConfigError, MessageError
from ....messages.journal import Entry, read
from ....messages.model import RolloutResult
from ....producer.training import number_of

MOST_STEP = 1 << 53
LONGEST_ID = 256
SIDES = ("A", "B")
Columns = tuple[tuple[str, Any], ...]
_TABLE = """CREATE TABLE seen (side INT, key TEXT, sample INT, job TEXT, step INT, digest TEXT, tokens INT DEFAULT 0,
  twice INT DEFAULT 0, PRIMARY KEY (side, key, sample)) WITHOUT ROWID"""
_RESULT = """INSERT INTO seen (side, key, sample, job, digest, tokens) VALUES (?, ?, ?, ?, ?, ?)
  ON CONFLICT DO UPDATE SET job = excluded.job, tokens = excluded.tokens, digest = excluded.digest,
  twice = twice OR (digest IS NOT NULL AND digest <> excluded.digest)"""
_TRAINED = """INSERT INTO seen (side, key, sample, job, step) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE
  SET step = excluded.step, twice = twice OR (step IS NOT NULL AND step <> excluded.step)"""
_FIRST = """SELECT key, sample, min(step), count(*), count(DISTINCT step), max(twice) FROM seen
  WHERE step IS NOT NULL OR NOT ? GROUP BY key, sample
  HAVING count(*) < 2 OR count(DISTINCT ifnull(digest, '')) > 1 OR count(DISTINCT step) > 1 OR max(twice)
  ORDER BY min(step), key, sample LIMIT 1"""


@dataclass(frozen=True, slots=True)
class Diff:
    """steps, samples, tokens: that both have, all the same, before they part. parts: where and how; "" if they are one.
    step, sample, token: the first that differ, as far as it is known; a sample of a feed is named by its prompt."""

    steps: int
    samples: int
    tokens: int
    parts: str = ""
    step: int | None = None
    sample: str = ""
    token: int | None = None

    def lines(self) -> list[str]:
        """For people."""
        same = f"{self.steps} steps, {self.samples} samples, {self.tokens} tokens"
        return [f"the same: {same}"] if not self.parts else [self.parts, f"the same before that: {same}"]


def diff(folders: tuple[str, str], on_problem: Callable[[str], None]) -> Diff:
    """Compare what two runs trained on; all results if neither journal says what was trained.

    Samples are compared by step and prompt: each token, its version, the bits of its log-probability, and how the
    sample ended. Memory is bounded: a row for each sample is in a temporary file. Raises ConfigError for a folder
    without results.
    """
    with tempfile.TemporaryDirectory(prefix="rolloutmq-diff-") as scratch, closing(_table(scratch)) as table:
        for side, folder in enumerate(folders):
            for entry in read(folder, events=("result", "note"), on_problem=on_problem):
                _note(table, side, entry, on_problem)
            if not table.execute("SELECT 1 FROM seen WHERE side = ? AND digest IS NOT NULL", (side,)).fetchone():
                raise ConfigError(f"{folder} has no results")
        return _compared(table, folders)


def _table(scratch: str) -> sqlite3.Connection:
    table = sqlite3.connect(f"{scratch}/seen", isolation_level=None)
    table.execute("PRAGMA journal_mode = OFF")
    table.execute("PRAGMA synchronous = OFF")
    table.execute(_TABLE)
    return table


def _note(table: sqlite3.Connection, side: int, entry: Entry, on_problem: Callable[[str], None]) -> None:
    job = entry.job_id[:LONGEST_ID]
    place = (side, _key(job), entry.sample, job)
    if entry.event == "note":
        step = entry.data.get("trained")
        if type(step) is int and 0 <= step < MOST_STEP:
            table.execute(_TRAINED, (*place, step))
        return
    try:
        result = entry.message
    except MessageError as error:
        on_problem(f"sample {job}.{entry.sample} of {SIDES[side]} cannot be read: {error}")
        return
    if isinstance(result, RolloutResult):
        told = hashlib.sha256()
        for _, values in _columns(result):
            told.update(b"|" + values.tobytes())
        told.update(result.finish_reason.encode())
        table.execute(_RESULT, (*place, told.hexdigest(), len(result.token_ids)))


def _compared(table: sqlite3.Connection, folders: tuple[str, str]) -> Diff:
    trained = bool(table.execute("SELECT 1 FROM seen WHERE step IS NOT NULL LIMIT 1").fetchone())
    found = table.execute(_FIRST, (trained,)).fetchone()
    where, bounds = "side = 0 AND (step IS NOT NULL OR NOT ?)", [trained]
    if found is not None:
        where += " AND (step, key, sample) < (?, ?, ?)" if trained else " AND (key, sample) < (?, ?)"
        bounds += [found[2], found[0], found[1]] if trained else [found[0], found[1]]
    sums = f"SELECT count(DISTINCT step), count(*), ifnull(sum(tokens), 0) FROM seen WHERE {where}"
    before: tuple[int, int, int] = table.execute(sums, bounds).fetchone()
    if found is None:
        return Diff(*before)
    key, sample, step, count, steps, twice = found
    rows = dict[int, tuple[str, int | None]]()
    for side, job, at in table.execute("SELECT side, job, step FROM seen WHERE key = ? AND sample = ?", (key, sample)):
        rows[side] = job, at
    name = f"{int(key, 16)}.{sample}" if number_of_text(key) is not None else f"{key}.{sample}"
    place = f"step {step}, sample {name}" if step is not None else f"sample {name}"
    token = None
    if twice:
        how = "a journal has it twice, and not the same"
    elif count < 2:
        how = f"only {SIDES[next(iter(rows))]} has it"
    elif steps > 1:
        how = "trained by " + " and ".join(f"{SIDES[side]} at step {at}" for side, (_, at) in sorted(rows.items()))
    else:
        one, other = (_find(folder, rows[side][0], sample) for side, folder in enumerate(folders))
        token, how = _first(one, other)
    return Diff(*before, parts=f"{place}: {how}", step=step, sample=name, token=token)


def _first(one: RolloutResult | None, other: RolloutResult | None) -> tuple[int | None, str]:
    """The first token at which two results part, and how."""
    if one is None or other is None:
        return None, f"{SIDES[one is not None]} has no result of it"
    places = [
        (int(differ[0]), name)
        for (name, mine), (_, its) in zip(_columns(one), _columns(other), strict=True)
        if (differ := np.flatnonzero(_bits(mine, its))).size
    ]
    if places:
        token, name = min(places, key=lambda it: it[0])
        a, b = (dict(_columns(result))[name][token].item() for result in (one, other))
        return token, f"they part at token {token}, {name} {a!r} and {b!r}"
    counts = len(one.token_ids), len(other.token_ids)
    if counts[0] != counts[1]:
        return min(counts), f"they part at token {min(counts)}, {counts[0]} tokens and {counts[1]}"
    return None, f"it ended by {one.finish_reason} and {other.finish_reason}"


def _bits(one: Any, other: Any) -> Any:
    """Where two columns differ, as far as both go. A NaN is the same as the same NaN."""
    count = min(len(one), len(other))
    return one[:count].view(f"i{one.itemsize}") != other[:count].view(f"i{one.itemsize}")


def _columns(result: RolloutResult) -> Columns:
    versions = np.repeat(*np.array([*result.segments], dtype=np.int64).reshape(-1, 2).T)
    logprobs = np.empty(0, np.float32) if result.logprobs is None else result.logprobs
    found = (("id", result.token_ids, np.int32), ("version", versions, np.int64), ("logprob", logprobs, np.float32))
    return tuple((name, np.ascontiguousarray(values, dtype)) for name, values, dtype in found)


def _find(folder: str, job: str, sample: int) -> RolloutResult | None:
    entries: Iterator[Entry] = read(folder, job=job, events="result", on_problem=lambda _: None)
    for entry in entries:
        if entry.sample == sample:
            try:
                result = entry.message
            except MessageError:
                continue
            if isinstance(result, RolloutResult):
                return result
    return None


def _key(job: str) -> str:
    """What two runs call the same: the prompt of a feed's job, else the job."""
    return job[:12] if number_of_text(job) is not None else job


def number_of_text(job: str) -> int | None:
    """As `number_of`, of any text."""
    try:
        return number_of(job)
    except ValueError:
        return None
