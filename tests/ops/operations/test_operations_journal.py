"""Compaction of a journal as an operation."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.journals import segments
from support.lazily import Lazily
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, InvalidField, new_id
from rolloutmq.messages.journal import Journal, Merged, merge, read
from rolloutmq.ops.operations import run_operation
from rolloutmq.ops.operations.catalog import Check, Context, checked, journal_compact

parquet = Lazily("pyarrow.parquet")


async def test_small_segments_are_merged(redis_db: str, tmp_path: Path) -> None:
    for run in range(3):
        with Journal(tmp_path) as journal:
            journal.note("a", run=run)
    params = {"journal": str(tmp_path), "without": "lost,consumed", "keep_s": 3600}
    seen: list[dict[str, Any]] = []
    at: dict[str, Any] = {"redis_url": redis_db, "pool": "default", "report": seen.append}
    result = await run_operation("journal-compact", params, **at)
    assert result == {"merged": 3, "into": 1, "deleted": 0, "dropped": 0, "left": {}}
    assert seen[-1]["progress"] == {"done": 3, "total": 3, "message": "segments merged"}
    assert [entry.data["run"] for entry in read(tmp_path, job="a")] == [0, 1, 2]
    assert len(segments(tmp_path)) == 4  # an hour later the three are deleted
    assert (await run_operation("journal-compact", params, **at))["merged"] == 0


async def test_work_that_blocks_can_be_cancelled() -> None:
    begun = threading.Event()
    ended: list[str] = []

    def work(check: Check) -> None:
        begun.set()
        try:
            while True:
                check()
        finally:
            ended.append("yes")

    running = asyncio.create_task(Context(redis=None, pool="p").blocking(work))  # type: ignore[arg-type]
    await asyncio.to_thread(begun.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["yes"]  # nothing goes on behind its back


async def test_a_merge_that_is_cancelled_leaves_the_journal_as_it_was(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in range(3):
        with Journal(tmp_path) as journal:
            journal.note("a", run=run)
    before = segments(tmp_path)
    params = {"journal": str(tmp_path)}
    at: dict[str, Any] = {"redis_url": redis_db, "pool": "default", "report": lambda _: None}
    written, go_on = threading.Event(), threading.Event()

    def held(*given: Any, change: Any, **more: Any) -> Merged:
        def slow(entry: Any) -> Any:
            written.set()
            go_on.wait()
            return change(entry)

        return merge(*given, change=slow, **more)

    monkeypatch.setattr(journal_compact, "merge", held)
    running = asyncio.create_task(run_operation("journal-compact", params, **at))
    await asyncio.to_thread(written.wait)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert segments(tmp_path) == before
    monkeypatch.undo()
    assert (await run_operation("journal-compact", params, **at))["merged"] == 3


async def test_a_table_is_written_once(redis_db: str, tmp_path: Path) -> None:
    job = GenerateJob(id=new_id(), token_ids=[1], reply_to="me")
    with Journal(tmp_path / "journal") as journal:
        journal.job(job)
        journal.outcome(result(job, 0), "me")
    out = tmp_path / "samples.parquet"
    params = {"journal": str(tmp_path / "journal"), "out": str(out)}
    seen: list[dict[str, Any]] = []
    at: dict[str, Any] = {"redis_url": redis_db, "pool": "default", "report": seen.append}
    assert await run_operation("journal-export", params, **at) == {"out": str(out), "rows": 1, "problems": []}
    assert parquet.read_table(out)["job_id"].to_pylist() == [job.id]
    with pytest.raises(InvalidField, match="out="):
        await run_operation("journal-export", params, **at)
    # The same job once more, as after a crash at its very end.
    notes = seen[-1]["notes"]
    assert (await run_operation("journal-export", params, notes=notes, **at))["rows"] == 1


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"journal": "j"}, "journal='j'"),
        ({"journal": "/j", "without": "jobs"}, "without.0='jobs'"),
        ({"journal": "/j", "grace_s": 0}, "grace_s=0"),
        ({"journal": "/j", "keep_s": -1}, "keep_s=-1"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidField, match=says):
        checked("journal-compact", params)
