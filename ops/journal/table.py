"""A journal as Arrow tables, for pandas, polars and DuckDB: `samples` with what was noted about them, and `events`."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgpack
import numpy as np

from ...messages.errors import ConfigError, InvalidField, MessageError
from ...messages.journal import Entry, read
from ...messages.model import GenerateJob, RolloutResult
from ..files import writing
from .lines import content, plain

if TYPE_CHECKING:
    import pyarrow as pa

Table = Literal["samples", "events"]
TABLES: tuple[Table, ...] = get_args(Table)
BATCH_ROWS, BATCH_TOKENS = 2048, 1 << 20
"""A batch, which is a row group of the file, ends when it has so many rows or tokens."""
NOTE_COLUMNS = 128
"""Names of notes that become columns, at most."""
_KINDS = {"integer": "int64", "number": "float64", "truth": "bool_", "text": "string"}


def export(
    folder: Path | str,
    file: Path,
    table: Table = "samples",
    *,
    overwrite: bool = False,
    on_problem: Callable[[str], None],
    **filters: Any,
) -> int:
    """Write a table of a journal as a Parquet file. Returns the number of rows.

    The file is there when it is complete, or not at all. Memory is bounded by a row group. filters: as those of
    `messages.journal.read`. Raises ConfigError without pyarrow or such a folder, InvalidField for a file that is there
    already or cannot be written.
    """
    if file.exists() and not overwrite:
        raise InvalidField("FILE", str(file), "a file that is not there yet, or give --overwrite")
    _arrow()  # the error of an install without it
    from pyarrow.parquet import ParquetWriter  # noqa: PLC0415

    rows, part = 0, file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with writing("FILE", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            reader = as_reader(folder, table, on_problem=on_problem, **filters)
            with ParquetWriter(part, reader.schema, compression="zstd") as writer:
                for batch in reader:
                    writer.write_batch(batch)
                    rows += batch.num_rows
            part.replace(file)
    finally:
        part.unlink(missing_ok=True)
    return rows


def as_reader(
    folder: Path | str, table: Table = "samples", *, on_problem: Callable[[str], None], **filters: Any
) -> pa.RecordBatchReader:
    """A table of a journal, batch by batch: `.read_all()`, `.read_pandas()`, `duckdb.from_arrow(…)`.

    What is joined, jobs and notes, waits in a temporary file meanwhile. filters: as those of `messages.journal.read`.
    Raises ConfigError.
    """
    arrow = _arrow()
    if table == "events":
        schema = arrow.schema(_event_kinds(arrow))
        rows: Iterable[dict[str, Any]] = (_event(entry) for entry in read(folder, on_problem=on_problem, **filters))
    else:
        joined = _Joined(folder, on_problem, filters)
        schema = arrow.schema(_sample_kinds(arrow) | joined.note_kinds(arrow))
        rows = joined.rows()
    return arrow.RecordBatchReader.from_batches(schema, _batches(arrow, schema, rows))


def _arrow() -> Any:
    try:
        import pyarrow  # noqa: PLC0415  # only who exports needs it
    except ModuleNotFoundError:
        raise ConfigError("tables need pyarrow: pip install 'rolloutmq[parquet]'") from None
    return pyarrow


def _batches(arrow: Any, schema: Any, rows: Iterable[dict[str, Any]]) -> Iterator[Any]:
    taken: list[dict[str, Any]] = []
    tokens = 0
    for row in rows:
        taken.append(row)
        tokens += row.get("tokens", 0)
        if len(taken) >= BATCH_ROWS or tokens >= BATCH_TOKENS:
            yield arrow.RecordBatch.from_pylist(taken, schema)
            taken, tokens = [], 0
    if taken:
        yield arrow.RecordBatch.from_pylist(taken, schema)


def _sample_kinds(arrow: Any) -> dict[str, Any]:
    ids, versions = arrow.list_(arrow.int32()), arrow.list_(arrow.int64())
    return {
        "time": arrow.timestamp("us", "UTC"), "job_id": arrow.string(), "sample": arrow.int32(), "n": arrow.int32(),
        "group_id": arrow.string(), "client_id": arrow.string(), "worker_id": arrow.string(), "attempt": arrow.int32(),
        "finish_reason": arrow.string(), "tokens": arrow.int32(), "token_ids": ids,
        "logprobs": arrow.list_(arrow.float32()), "versions": versions, "oldest_version": arrow.int64(),
        "newest_version": arrow.int64(), "legs": ids, "in_place": ids, "prompt_ids": ids, "text": arrow.string(),
        "adapter": arrow.string(), "adapter_version": arrow.int64(), "cached_tokens": arrow.int32(),
        "session_id": arrow.string(), "queued_s": arrow.float64(), "generating_s": arrow.float64(),
        "waiting_s": arrow.float64(), "seed": arrow.int64(), "sampling": arrow.string(), "metadata": arrow.string(),
        "fingerprint": arrow.string(),
    }  # fmt: skip


def _event_kinds(arrow: Any) -> dict[str, Any]:
    return {
        "time": arrow.timestamp("us", "UTC"), "event": arrow.string(), "what": arrow.string(), "job_id": arrow.string(),
        "sample": arrow.int32(), "attempt": arrow.int32(), "client_id": arrow.string(), "group_id": arrow.string(),
        "versions": arrow.list_(arrow.int64()), "data": arrow.string(),
    }  # fmt: skip


def _event(entry: Entry) -> dict[str, Any]:
    what = entry.data.get("what")
    return {
        "time": _micros(entry.at), "event": entry.event, "what": what if isinstance(what, str) else None,
        "job_id": entry.job_id or None, "sample": None if entry.sample < 0 else entry.sample,
        "attempt": None if entry.attempt < 0 else entry.attempt, "client_id": entry.client_id or None,
        "group_id": entry.group_id or None, "versions": list(entry.versions),
        "data": _json(dict(entry.data)) if entry.data else None,
    }  # fmt: skip


def _sample(entry: Entry, result: RolloutResult, job: GenerateJob | None) -> dict[str, Any]:
    prompt = result.prompt_ids if result.prompt_ids is not None or job is None else job.token_ids
    versions = [segment.version for segment in result.segments]
    counts = [segment.tokens for segment in result.segments]
    took = result.timings
    return {
        "time": _micros(entry.at), "job_id": result.job_id, "sample": result.sample, "n": result.n,
        "group_id": result.group_id, "client_id": entry.client_id, "worker_id": result.worker_id,
        "attempt": result.attempt, "finish_reason": result.finish_reason, "tokens": len(result.token_ids),
        "token_ids": _own(result.token_ids), "logprobs": _own(result.logprobs),
        "versions": np.repeat(np.array(versions, np.int64), counts), "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None), "legs": list(result.legs), "in_place": list(result.in_place),
        "prompt_ids": _own(prompt), "text": result.text, "adapter": result.adapter,
        "adapter_version": result.adapter_version,
        "cached_tokens": result.cached_tokens, "session_id": result.session_id, "queued_s": took.queued,
        "generating_s": took.generating, "waiting_s": took.waiting, "seed": None if job is None else job.seed,
        "sampling": None if job is None else _json(job.sampling), "metadata": _json(result.metadata),
        "fingerprint": _json(result.fingerprint),
    }  # fmt: skip


class _Joined:
    """Results with their jobs and notes. Notes come after their results, so the journal is read twice: jobs and notes
    go into a temporary file (SQLite), where each result finds its own."""

    def __init__(self, folder: Path | str, on_problem: Callable[[str], None], filters: Mapping[str, Any]) -> None:
        self._folder, self._problem, self._filters = folder, on_problem, filters
        self._place = tempfile.TemporaryDirectory(prefix="rolloutmq-")
        # DuckDB reads Arrow's batches in a thread of its own, one at a time.
        self._db = sqlite3.connect(Path(self._place.name) / "joined.db", check_same_thread=False)
        self._db.executescript("PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-65536;")
        self._db.execute("CREATE TABLE kept (name TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")
        self._kinds: dict[str, str] = {}
        self._fill()

    def _fill(self) -> None:
        jobs = self._filters.get("job")
        for entry in read(self._folder, job=jobs, events=("job", "note"), on_problem=self._problem):
            if entry.event == "job" and isinstance(entry.content, bytes):
                self._keep(f"job {entry.job_id}", entry.content, anew=False)
            elif entry.event == "note":
                name = f"note {entry.job_id} {entry.sample}"
                noted = self._noted(name) | {str(key): self._seen(str(key), value) for key, value in entry.data.items()}
                self._keep(name, msgpack.packb(noted), anew=True)

    def _seen(self, name: str, value: Any) -> Any:
        """The note as plain data. Its name becomes a column of the kind that all of its values have."""
        value = plain(value)
        if value is None:
            return None
        if name not in self._kinds and len(self._kinds) == NOTE_COLUMNS:
            self._problem(f"there are more than {NOTE_COLUMNS} names of notes; {name!r:.60} is left out")
            return None
        kind, known = _kind(value), self._kinds.get(name)
        together = {kind, known or kind}
        self._kinds[name] = kind if len(together) == 1 else "number" if together == {"integer", "number"} else "json"
        return value

    def note_kinds(self, arrow: Any) -> dict[str, Any]:
        """A column for each name of a note."""
        made = {"numbers": arrow.list_(arrow.float32()), "json": arrow.string()}
        made |= {kind: getattr(arrow, name)() for kind, name in _KINDS.items()}
        return {f"note_{name}": made[kind] for name, kind in sorted(self._kinds.items())}

    def rows(self) -> Iterator[dict[str, Any]]:
        """The samples, each once, in the order in which they arrived."""
        with self._place, closing(self._db):
            for entry in read(self._folder, events="result", on_problem=self._problem, **self._filters):
                if not self._keep(f"seen {entry.job_id} {entry.sample}", b"", anew=False):
                    continue
                result, problem = content(entry)
                if isinstance(result, RolloutResult):
                    yield _sample(entry, result, self._job(entry.job_id)) | self._notes(entry)
                elif problem:
                    self._problem(f"sample {entry.job_id}.{entry.sample}: {problem}")

    def _notes(self, entry: Entry) -> dict[str, Any]:
        noted = self._noted(f"note {entry.job_id} -1") | self._noted(f"note {entry.job_id} {entry.sample}")
        kinds = self._kinds
        return {
            f"note_{name}": _json(value) if kinds[name] == "json" and value is not None else value
            for name, value in noted.items()
            if name in kinds
        }

    def _job(self, job_id: str) -> GenerateJob | None:
        found = self._get(f"job {job_id}")
        try:
            message = None if found is None else Entry("job", 0.0, content=found).message
        except MessageError:
            return None
        return message if isinstance(message, GenerateJob) else None

    def _noted(self, name: str) -> dict[str, Any]:
        found = self._get(name)
        return {} if found is None else dict(msgpack.unpackb(found))

    def _get(self, name: str) -> bytes | None:
        found = self._ask("SELECT value FROM kept WHERE name = ?", name).fetchone()
        return None if found is None else bytes(found[0])

    def _keep(self, name: str, value: bytes, *, anew: bool) -> bool:
        """anew: in place of what is there. Whether it was kept."""
        how = "REPLACE" if anew else "IGNORE"
        return self._ask(f"INSERT OR {how} INTO kept VALUES (?, ?)", name, value).rowcount == 1

    def _ask(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._db.execute(statement, values)
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"temporary folder {tempfile.gettempdir()}: {error}; TMPDIR may name one with more room"
            ) from error


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "integer" if -(1 << 63) <= value < 1 << 63 else "json"
    if isinstance(value, list) and all(one is None or type(one) in (int, float) for one in value):
        return "numbers"
    return "number" if isinstance(value, float) else "text" if isinstance(value, str) else "json"


def _own(array: Any) -> Any:
    """A copy, or None: the array is a part of its message, which may also have megabytes of hidden states."""
    return None if array is None else np.array(array)


def _json(value: Any) -> str:
    return json.dumps(plain(value), ensure_ascii=True)


def _micros(at: float) -> int | None:
    return round(at * 1e6) if math.isfinite(at) and abs(at) < 1e12 else None
