"""A run out of its journals, in columns of numbers: a hundred thousand jobs are some megabytes, read once."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ...messages.errors import MessageError
from ...messages.journal import Entry
from ...messages.model import PRIORITIES, GenerateJob, RolloutResult
from ..terminal import printable

NAN = math.nan
TEXT = 300
EVENTS_OF_WORKER = 20_000
"""Of each worker; more of them are left out."""
PROBLEMS = 100
MANY_NAMES = 100_000
FATES = ("", "trained", "dropped")
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
What = Literal["join", "leave", "death", "sync", "fault", "stall", "state"]


@dataclass(frozen=True, slots=True)
class Failed:
    """One job that failed. entry: of its dead letter, "" if it cannot be requeued."""

    at: float
    job_id: str
    text: str
    entry: str = ""


class Names:
    """Texts as numbers. Beyond MANY_NAMES every new one is the number 0, which is ""."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self.texts: list[str] = [""]

    def __getitem__(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            if len(self.texts) >= MANY_NAMES:
                return 0
            number = self._numbers[name] = len(self.texts)
            self.texts.append(name)
        return number


class Columns:
    """Rows of numbers, column by column. kinds: of `array`: "d" floats, "q" integers."""

    def __init__(self, **kinds: str) -> None:
        self._parts = {name: array(kind) for name, kind in kinds.items()}
        self._empty: list[tuple[Any, float]] = [
            (self._parts[name], NAN if kind == "d" else 0) for name, kind in kinds.items()
        ]
        self.rows = 0

    def add(self) -> int:
        """A new row, of NaN and 0. Returns its number."""
        for part, empty in self._empty:
            part.append(empty)
        self.rows += 1
        return self.rows - 1

    def __getitem__(self, name: str) -> Any:
        """The column, to read and write single rows."""
        return self._parts[name]

    def frame(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything: (rows,) float64 or int64 by name."""
        return {name: np.array(part) for name, part in self._parts.items()}


@dataclass(slots=True)
class WorkerLife:
    """What a journal says of a worker. events: (time, what, version or None, text), in order of time. own: whether it
    wrote a journal itself. began, heard: when it was there first and last. ended: how it said that it ends, "" if it
    did not. slow: seconds that updates of its weights took while it held samples, each with its version."""

    name: str
    host: str = ""
    device: str = ""
    slots: int = 0
    own: bool = False
    began: float = math.inf
    heard: float = -math.inf
    ended: str = ""
    events: list[tuple[float, What, int | None, str]] = field(default_factory=list)
    slow: list[tuple[float, int, float, int]] = field(default_factory=list)


class Run:
    """Everything that the dashboard and the report know of a run. Give `add` the entries of its journals, in any order;
    one that comes again changes nothing.

    jobs, samples, attempts: see `__init__`. committed: version -> when it was first heard of. publishes: of (time,
    version) state and text. failures: by job. lost: entries that writers dropped. unread: results that cannot be read.
    counts: of entries, by kind. problems: of files, see `problem`.
    """

    def __init__(self) -> None:
        self.names, self.workers = Names(), dict[str, WorkerLife]()
        self.job_ids: dict[str, int] = {}
        self.jobs = Columns(at="d", n="q", client="q", asks="q", priority="q", claimed="d", end="d", done="q", ok="q")
        self.samples = Columns(
            at="d", job="q", sample="q", worker="q", client="q", session="q", oldest="q", newest="q", tokens="q",
            queued="d", generating="d", waiting="d", attempt="q", finish="q", consumed="d", reward="d", stale="d",
            waited="d", fate="q", why="q",
        )  # fmt: skip
        self.attempts = Columns(
            at="d", job="q", attempt="q", worker="q", queued="d", samples="q", end="d", over="q", saved_at="d", kept="q"
        )
        self._rows: dict[tuple[int, int], int] = {}
        self._tries: dict[tuple[int, int], int] = {}
        self.committed: dict[int, float] = {}
        self.publishes: dict[tuple[float, int], tuple[str, str]] = {}
        self.failures: dict[str, Failed] = {}
        self.counts: Counter[str] = Counter()
        self.lost = self.unread = 0
        self.first, self.last = math.inf, -math.inf
        self.problems: list[str] = []
        self._seen: set[tuple[Any, ...]] = set()

    def problem(self, line: str) -> None:
        """As `on_problem` of a journal's reader."""
        if len(self.problems) < PROBLEMS and line not in self.problems:
            self.problems.append(printable(line[:TEXT]))

    def take(self, entries: Iterable[Entry]) -> None:
        """Add them all."""
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take in one entry. What is odd in it is passed over."""
        if entry.event != "lost":
            self.first, self.last = min(self.first, entry.at), max(self.last, entry.at)
        adds = _ADD.get(entry.event)
        if adds is not None:
            adds(self, entry)

    # --- jobs and samples ---

    def job(self, job_id: str) -> int:
        """The row of a job."""
        row = self.job_ids.get(job_id)
        if row is None:
            row = self.job_ids[job_id] = self.jobs.add()
        return row

    def row(self, job: int, sample: int) -> int:
        """The row of a sample."""
        row = self._rows.get((job, sample))
        if row is None:
            row = self._rows[job, sample] = self.samples.add()
            self.samples["job"][row], self.samples["sample"][row] = job, sample
        return row

    def _job(self, entry: Entry) -> None:
        row, jobs = self.job(entry.job_id), self.jobs
        if not math.isnan(jobs["at"][row]):
            return
        self.counts["job"] += 1
        jobs["at"][row], jobs["client"][row] = entry.at, self.names[entry.client_id]
        try:
            job = entry.message
        except MessageError:
            job = None
        jobs["n"][row] = getattr(job, "n", 0) if job is not None else 0
        jobs["priority"][row] = PRIORITIES.index("normal")
        if isinstance(job, GenerateJob):
            jobs["priority"][row] = PRIORITIES.index(job.priority)
            jobs["asks"][row] = self.names[", ".join(job.features_used())]

    def _result(self, entry: Entry) -> None:
        job = self.job(entry.job_id)
        row, of = self.row(job, entry.sample), self.samples
        if entry.sample < 0 or not math.isnan(of["at"][row]):
            return
        try:
            result = entry.message
        except MessageError:
            result = None
        self.counts["result"] += 1
        of["at"][row], of["client"][row] = entry.at, self.names[entry.client_id]
        of["attempt"][row] = max(0, entry.attempt)
        of["oldest"][row], of["newest"][row] = min(entry.versions, default=-1), max(entry.versions, default=-1)
        for version in entry.versions:
            self.committed[version] = min(entry.at, self.committed.get(version, math.inf))
        n = self.jobs["n"][job]
        if isinstance(result, RolloutResult):
            took = result.timings
            of["tokens"][row], of["worker"][row] = len(result.token_ids), self.names[result.worker_id]
            for name in ("queued", "generating", "waiting"):
                of[name][row] = _seconds(getattr(took, name))
            of["finish"][row] = self.names[result.finish_reason]
            of["session"][row] = self.names[result.session_id or ""]
            n = self.jobs["n"][job] = result.n
            self._heard_by_result(result, entry)
        else:
            self.unread += 1
        self.jobs["done"][job] += 1
        if n and self.jobs["done"][job] >= n:
            self.jobs["end"][job], self.jobs["ok"][job] = entry.at, 1

    def _heard_by_result(self, result: RolloutResult, entry: Entry) -> None:
        worker = self._worker(result.worker_id)
        if not worker.own:
            took = _seconds(result.timings.generating) + _seconds(result.timings.waiting)
            worker.began, worker.heard = min(worker.began, entry.at - took), max(worker.heard, entry.at)

    def _failure(self, entry: Entry) -> None:
        job = self.job(entry.job_id)
        if entry.job_id in self.failures:
            return
        self.jobs["end"][job] = entry.at
        text = ": ".join(part for name in ("outcome", "cause", "error") if (part := _text(entry, name)))
        self.failures[entry.job_id] = Failed(entry.at, entry.job_id, text[:TEXT] or "written without its cause")

    def _consumed(self, entry: Entry) -> None:
        if entry.sample >= 0:
            row = self.row(self.job(entry.job_id), entry.sample)
            if math.isnan(self.samples["consumed"][row]):
                self.samples["consumed"][row] = entry.at
                self.counts["consumed"] += 1

    def _note(self, entry: Entry) -> None:
        if entry.sample < 0 or not entry.job_id:
            return
        row, of, data = self.row(self.job(entry.job_id), entry.sample), self.samples, entry.data
        for name, column in (
            ("return", "reward"),
            ("reward", "reward"),
            ("staleness", "stale"),
            ("waited_s", "waited"),
        ):
            value = data.get(name)
            if isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e30:
                of[column][row] = value
        if "trained" in data:
            of["fate"][row] = FATES.index("trained")
        elif "dropped" in data:
            of["fate"][row], of["why"][row] = FATES.index("dropped"), self.names[str(data["dropped"])[:80]]

    # --- what workers and publishers write ---

    def _attempt(self, entry: Entry) -> None:
        name, what = _text(entry, "worker"), _text(entry, "what")
        job = self.job(entry.job_id)
        self._own(name, entry.at)
        row, of = self._tries.get((job, entry.attempt)), self.attempts
        if row is None:
            row = self._tries[job, entry.attempt] = of.add()
            of["job"][row], of["attempt"][row], of["worker"][row] = job, entry.attempt, self.names[name]
            of["end"][row] = entry.at
        of["end"][row] = max(of["end"][row], entry.at)
        if what == "claimed":
            of["at"][row], of["queued"][row] = entry.at, _number(entry.data.get("queued_s"))
            of["samples"][row] = _whole(entry.data.get("samples"))
            claimed = self.jobs["claimed"]
            claimed[job] = entry.at if math.isnan(claimed[job]) else min(entry.at, claimed[job])
        elif what == "saved":
            of["saved_at"][row] = entry.at
        elif what == "published" and _text(entry, "state") == "ok" and self._is_new(entry, "published"):
            of["kept"][row] += 1
        elif what in {"given back", "dead-lettered", "expired"}:
            of["over"][row] = 1

    def _weights(self, entry: Entry) -> None:
        what, name = _text(entry, "what"), _text(entry, "worker")
        version = entry.versions[0] if entry.versions else None
        if version is None or not self._is_new(entry, what):
            return
        if name:
            self._of_update(entry, name, what, version)
        else:
            failures = entry.data.get("failures")
            told = "; ".join(f"{who}: {why}" for who, why in failures.items()) if isinstance(failures, Mapping) else ""
            adapter = _text(entry, "adapter")
            state = "ok" if what == "committed" else "withdrawn" if what in {"aborted", "superseded"} else "failed"
            took = _number(entry.data.get("seconds"))
            text = f"{f'adapter {adapter}, ' if adapter else ''}{what} in {took:.1f} s{', but ' + told if told else ''}"
            self.publishes[entry.at, version] = state, printable(text[:TEXT])
            if what == "committed" and not adapter:
                self.committed[version] = min(entry.at, self.committed.get(version, math.inf))

    def _of_update(self, entry: Entry, name: str, what: str, version: int) -> None:
        worker = self._own(name, entry.at)
        if _text(entry, "adapter"):
            return
        if what == "loaded":
            seconds = _number(entry.data.get("seconds"))
            self._tell(worker, entry.at, "sync", version, f"digests verified, {seconds:.2f} s")
            self.committed[version] = min(entry.at, self.committed.get(version, math.inf))
        elif what == "refused":
            of = " of the snapshot" if _text(entry, "transport") == "disk" else ""
            told = f"refused: {_text(entry, 'phase')}{of}: {_text(entry, 'error')}"
            self._tell(worker, entry.at, "fault", version, told)
        elif what == "went on" and len(worker.slow) < EVENTS_OF_WORKER:
            seconds, tokens = _number(entry.data.get("seconds")), _whole(entry.data.get("tokens"))
            worker.slow.append((entry.at, version, seconds, tokens))

    def _of_worker(self, entry: Entry) -> None:
        what, name, data = _text(entry, "what"), _text(entry, "worker"), entry.data
        if not name or not self._is_new(entry, what):
            return
        worker = self._own(name, entry.at)
        if what in {"joined", "present"}:
            worker.host, worker.device = _text(entry, "host"), _text(entry, "device")
            worker.slots = max(worker.slots, _whole(data.get("max_running")))
            self._tell(worker, entry.at, "join", _whole(data.get("version")), f"on {worker.host}, {worker.device}")
        elif what in {"left", "lease lost"}:
            worker.ended = what
            text = f"it left with {_whole(data.get('held'))} jobs" if what == "left" else _text(entry, "error")
            self._tell(worker, entry.at, "leave" if what == "left" else "death", None, text or what)
        elif what in {"engine died", "pre-empted"}:
            self._tell(worker, entry.at, "fault", None, f"{what} {_text(entry, 'notice')}".strip())
        elif what == "command" and not _text(entry, "error"):
            state = _STATES.get(_text(entry, "action"))
            if state is not None:
                self._tell(worker, entry.at, "state", None, state)

    def _lost(self, entry: Entry) -> None:
        if self._is_new(entry, "lost"):
            self.lost += _whole(entry.data.get("entries"))

    def _tell(self, worker: WorkerLife, at: float, what: What, version: int | None, text: str) -> None:
        if len(worker.events) < EVENTS_OF_WORKER:
            worker.events.append((at, what, version, printable(text[:TEXT])))

    def _own(self, name: str, at: float) -> WorkerLife:
        """A worker that writes a journal of its own."""
        worker = self._worker(name)
        if not worker.own:
            worker.own, worker.began, worker.heard = True, at, at
        worker.began, worker.heard = min(worker.began, at), max(worker.heard, at)
        return worker

    def _worker(self, name: str) -> WorkerLife:
        number = self.names[name]
        name = self.names.texts[number]
        return self.workers.setdefault(name, WorkerLife(name))

    def _is_new(self, entry: Entry, what: str) -> bool:
        """Whether it has not come before: a merged journal, or one that is followed, may have entries twice."""
        key = (entry.at, what, entry.job_id, entry.sample, entry.versions, _text(entry, "worker"))
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


_STATES = {"pause": "paused", "resume": "serving", "sleep": "sleeping", "wake": "serving", "drain": "draining"}
_ADD: dict[str, Callable[[Run, Entry], None]] = {
    "job": Run._job, "result": Run._result, "failure": Run._failure,
    "consumed": Run._consumed, "note": Run._note, "attempt": Run._attempt,
    "weights": Run._weights, "worker": Run._of_worker, "lost": Run._lost,
}  # fmt: skip


def _text(entry: Entry, name: str) -> str:
    value = entry.data.get(name)
    return value[:TEXT] if isinstance(value, str) else ""


def _seconds(value: float) -> float:
    return value if 0 <= value < 1e9 else 0.0


def _number(value: Any) -> float:
    return _seconds(float(value)) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0
