"""A journal as Arrow tables, for pandas, polars and DuckDB: `samples` with what was noted about them, and `events`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ...messages.errors import ConfigError, InvalidField
from ...messages.journal import Entry, read
from ..files import writing
from .lines import plain
from .recorded import Recorded, recorded

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

    filters: as those of `messages.journal.read`. Notes come after their results, and their names are columns, so the
    notes are read once before. Raises ConfigError.
    """
    arrow = _arrow()
    if table == "events":
        schema = arrow.schema(_event_kinds(arrow))
        rows: Iterable[dict[str, Any]] = (_event(entry) for entry in read(folder, on_problem=on_problem, **filters))
    else:
        job = filters.pop("job", None)
        jobs = [job] if isinstance(job, str) else job
        kinds = _note_kinds(read(folder, job=jobs, events="note", on_problem=on_problem), on_problem)
        schema = arrow.schema(_sample_kinds(arrow) | _note_columns(arrow, kinds))
        samples = recorded(folder, jobs=jobs, on_problem=on_problem, on_unread=on_problem, **filters)
        rows = (_sample(one) | _notes(one.notes, kinds) for one in samples)
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


def _sample(one: Recorded) -> dict[str, Any]:
    result, job = one.result, one.job
    versions = [segment.version for segment in result.segments]
    counts = [segment.tokens for segment in result.segments]
    took = result.timings
    return {
        "time": _micros(one.at), "job_id": result.job_id, "sample": result.sample, "n": result.n,
        "group_id": result.group_id, "client_id": one.client_id, "worker_id": result.worker_id,
        "attempt": result.attempt, "finish_reason": result.finish_reason, "tokens": len(result.token_ids),
        "token_ids": _own(result.token_ids), "logprobs": _own(result.logprobs),
        "versions": np.repeat(np.array(versions, np.int64), counts), "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None), "legs": list(result.legs), "in_place": list(result.in_place),
        "prompt_ids": _own(one.prompt_ids), "text": result.text, "adapter": result.adapter,
        "adapter_version": result.adapter_version,
        "cached_tokens": result.cached_tokens, "session_id": result.session_id, "queued_s": took.queued,
        "generating_s": took.generating, "waiting_s": took.waiting, "seed": None if job is None else job.seed,
        "sampling": None if job is None else _json(job.sampling), "metadata": _json(result.metadata),
        "fingerprint": _json(result.fingerprint),
    }  # fmt: skip


def _note_kinds(notes: Iterable[Entry], on_problem: Callable[[str], None]) -> dict[str, str]:
    """The name of each note, and the kind that all of its values have."""
    kinds: dict[str, str] = {}
    for entry in notes:
        for name, value in ((str(key), plain(value)) for key, value in entry.data.items()):
            if value is None:
                continue
            if name not in kinds and len(kinds) == NOTE_COLUMNS:
                on_problem(f"there are more than {NOTE_COLUMNS} names of notes; {name!r:.60} is left out")
                continue
            kind = _kind(value)
            together = {kind, kinds.get(name, kind)}
            kinds[name] = kind if len(together) == 1 else "number" if together == {"integer", "number"} else "json"
    return kinds


def _note_columns(arrow: Any, kinds: Mapping[str, str]) -> dict[str, Any]:
    made = {"numbers": arrow.list_(arrow.float32()), "json": arrow.string()}
    made |= {kind: getattr(arrow, name)() for kind, name in _KINDS.items()}
    return {f"note_{name}": made[kind] for name, kind in sorted(kinds.items())}


def _notes(notes: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    told = {str(name): plain(value) for name, value in notes.items()}
    return {
        f"note_{name}": _json(value) if kinds[name] == "json" and value is not None else value
        for name, value in told.items()
        if name in kinds
    }


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
