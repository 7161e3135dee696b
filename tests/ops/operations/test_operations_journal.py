"""Compaction of a journal as an operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.journals import segments

from rolloutmq.messages import InvalidField
from rolloutmq.messages.journal import Journal, read
from rolloutmq.ops.operations import run_operation
from rolloutmq.ops.operations.catalog import checked


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
