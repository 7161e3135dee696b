"""Export and garbage collection of snapshots as operations."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis
from support.peers.disk_weights import check_versions, snapshot
from support.specimens.messages import result

from rolloutmq.messages import GenerateJob, Segment, new_id
from rolloutmq.messages.journal import Journal
from rolloutmq.ops.operations import run_operation
from rolloutmq.sync.disk import export
from rolloutmq.sync.disk.errors import SnapshotConflict, SnapshotError
from rolloutmq.sync.disk.store import SnapshotStore


def run(url: str, name: str, **params: Any) -> dict[str, Any]:
    at: dict[str, Any] = {"redis_url": url, "pool": "default", "report": lambda _: None}
    return asyncio.run(run_operation(name, params, **at))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = SnapshotStore(tmp_path / "versions", keep=9, file_bytes=6000)
    for version in (1, 2, 3, 4, 5):
        store.save(snapshot(version))
    return tmp_path / "versions"


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_what_is_exported_is_the_same_version(kind: str, folder: Path, redis_db: str, tmp_path: Path) -> None:
    target = tmp_path / "copies"
    to = str(target) if kind == "folder" else f"file://{target}"
    first = run(redis_db, "snapshots-export", folder=str(folder), to=to, versions=[2, 4])
    assert (first["exported"], first["there"]) == ([2, 4], [])
    assert first["nbytes"] > 0
    assert check_versions(SnapshotStore(target), target) == [2, 4]
    rest = run(redis_db, "snapshots-export", folder=str(folder), to=to)
    assert (rest["exported"], rest["there"]) == ([1, 3, 5], [2, 4])
    assert check_versions(SnapshotStore(target), target) == [1, 2, 3, 4, 5]
    other = tmp_path / "other"
    SnapshotStore(other).save(snapshot(2, seed=7))
    with pytest.raises(SnapshotConflict, match="other contents"):
        run(redis_db, "snapshots-export", folder=str(other), to=to)
    assert check_versions(SnapshotStore(target), target) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["folder", "url"])
def test_a_copy_that_is_not_what_was_read_is_no_version(
    kind: str, folder: Path, redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(source: Any, write: Any, check: Any) -> str:
        digest = copied(source, write, check)
        write(b"x")
        return digest

    copied = export._copied
    target = tmp_path / "copies"
    to = str(target) if kind == "folder" else f"file://{target}"
    monkeypatch.setattr(export, "_copied", spoilt)
    with pytest.raises(SnapshotError, match="does not have what was written to it"):
        run(redis_db, "snapshots-export", folder=str(folder), to=to, versions=[1])
    assert SnapshotStore(target).versions() == []
    monkeypatch.undo()
    assert run(redis_db, "snapshots-export", folder=str(folder), to=to, versions=[1])["exported"] == [1]
    assert check_versions(SnapshotStore(target), target) == [1]


def test_what_a_replay_may_need_stays(folder: Path, redis_db: str, tmp_path: Path) -> None:
    journal, store = tmp_path / "journal", SnapshotStore(folder)
    job = GenerateJob(id=new_id(), token_ids=[1], reply_to="me")
    with Journal(journal) as writing:
        writing.outcome(result(job, 0, segments=(Segment(2, 1), Segment(3, 1))), "me")
    store.pin(1)
    asked = {"folder": str(folder), "keep": 1, "journal": str(journal)}
    told = run(redis_db, "snapshots-gc", **asked)
    assert (told["garbage"], told["removed"], told["left"]) == ([4], [], [1, 2, 3, 4, 5])
    assert (told["pinned"], told["needed"], told["problems"]) == ([1], [2, 3], [])
    assert run(redis_db, "snapshots-gc", **asked, until=1.0)["garbage"] == [2, 3, 4]
    with store.load(4):
        told = run(redis_db, "snapshots-gc", **asked, delete=True)
        assert (told["garbage"], told["removed"]) == ([4], [])
    told = run(redis_db, "snapshots-gc", **asked, delete=True)
    assert (told["garbage"], told["removed"], told["left"]) == ([], [4], [1, 2, 3, 5])


def test_nothing_is_removed_while_the_journal_cannot_be_read(folder: Path, redis_db: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    Journal(journal).close()
    (segment,) = journal.iterdir()
    asked = {"folder": str(folder), "keep": 1, "journal": str(journal), "delete": True}
    segment.write_bytes(b"of another format, and longer than a header would be")
    told = run(redis_db, "snapshots-gc", **asked)
    assert told["removed"] == []
    assert str(segment) in told["problems"][0]
    segment.unlink()
    assert run(redis_db, "snapshots-gc", **asked)["removed"] == [1, 2, 3, 4]


def test_the_committed_version_stays(folder: Path, redis_db: str) -> None:
    with redis.Redis.from_url(redis_db) as db:
        db.hset("rmq:{default}:weights", "committed", 3)
    told = run(redis_db, "snapshots-gc", folder=str(folder), keep=1, delete=True)
    assert (told["removed"], told["needed"]) == ([1, 2, 4], [3])
