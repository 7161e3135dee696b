"""A journal at a URL: segments go there when they are complete, whatever fails or dies, and are read by ranges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from support.journals import Problems, segments
from support.specimens.messages import job

from rolloutmq.messages import ConfigError, InvalidField
from rolloutmq.messages.journal import SUFFIX, Journal, read, remote
from rolloutmq.messages.journal.segment import Header, SegmentWriter


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote.tempfile, "gettempdir", lambda: str(tmp_path))
    place = f"memory://{uuid4().hex}"
    yield place
    filesystem = MemoryFileSystem()
    if filesystem.exists(place):
        filesystem.rm(place, recursive=True)


def there(url: str) -> list[str]:
    return sorted(MemoryFileSystem().glob(f"{url.removeprefix('memory:/')}/*{SUFFIX}"))


def write(url: str, count: int) -> list[str]:
    """Ids of jobs, each in a segment of its own."""
    jobs = [job() for _ in range(count)]
    with Journal(url, segment_bytes=10) as journal:
        for one in jobs:
            journal.job(one)
            journal.flush(30)
    return [one.id for one in jobs]


def test_a_run_is_elsewhere_in_the_end(url: str) -> None:
    problems = Problems()
    ids = write(url, 3)
    assert [entry.job_id for entry in read(url, on_problem=problems)] == ids
    assert [entry.job_id for entry in read(url, job=ids[1], on_problem=problems)] == ids[1:2]
    assert problems == []
    assert segments(remote.spool_for(url)) == []


def test_only_the_blocks_of_a_job_are_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(token_ids=list(range(i, i + 5000))) for i in range(20)]
    with Journal(url) as journal:
        for one in jobs:
            journal.job(one)
            journal.flush(30)
    fetched: list[int] = []
    really = MemoryFile.read

    def counted(file: MemoryFile, *size: Any) -> bytes:
        data: bytes = really(file, *size)
        fetched.append(len(data))
        return data

    monkeypatch.setattr(MemoryFile, "read", counted)
    (path,) = there(url)
    assert [entry.job_id for entry in read(url, job=jobs[7].id)] == [jobs[7].id]
    assert sum(fetched) < MemoryFileSystem().size(path) / 4


def test_a_copy_that_fails_is_tried_again(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "RETRY_S", 0.01)
    put, refusals = MemoryFileSystem.put_file, [1, 2, 3]

    def refuse(filesystem: MemoryFileSystem, *named: Any, **more: Any) -> None:
        if refusals:
            refusals.pop()
            raise OSError("slow down")
        put(filesystem, *named, **more)

    monkeypatch.setattr(MemoryFileSystem, "put_file", refuse)
    with Journal(url, segment_bytes=10) as journal:
        ids = []
        for _ in range(3):
            one = job()
            ids.append(one.id)
            journal.job(one)
            assert journal.flush(30)  # nobody waits for the copy
        while refusals:
            journal.flush(0.01)
    assert [entry.job_id for entry in read(url)] == ids
    assert "slow down" in caplog.text


def test_what_a_dead_process_has_left_is_moved_by_the_next_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = remote.spool_for(url)
    spool.mkdir(parents=True)
    for number, age in ((0, 0.0), (1, 2 * remote.LEFT_S)):  # complete; torn, and long ago
        segment = SegmentWriter(spool, Header("dead", number, 1.0 + number))
        segment.close(complete=not number)
        at = segment.path.stat().st_mtime - age
        os.utime(segment.path, (at, at))
    young = SegmentWriter(spool, Header("young", 0, 9.0))
    ids = write(url, 1)
    assert [Path(path).name.split("-")[1] for path in there(url)][:2] == ["dead", "dead"]
    assert [path.name for path in segments(spool)] == [young.path.name]
    assert [entry.job_id for entry in read(url)] == ids
    young.close()


def test_what_cannot_be_is_said_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read(url)
    for bad in ("smell://bucket/run",):
        with pytest.raises(ConfigError, match="smell"):
            Journal(bad)
        with pytest.raises(ConfigError, match="smell"):
            read(bad)
    with pytest.raises(InvalidField, match="keep_bytes"):
        Journal(url, keep_bytes=1000)


def test_no_error_shows_a_password(tmp_path: Path) -> None:
    for bad in ("smell://me:hunter2@host/run?token=hunter3", "memory://me:hunter2@host/run?token=hunter3"):
        with pytest.raises(ConfigError, match=r"journal '?(smell|memory)://host/run") as caught:
            read(bad)
        assert "hunter" not in str(caught.value)
    with pytest.raises(ConfigError, match="journal smell://host/run") as caught:
        Journal("smell://me:hunter2@host/run")
    assert "hunter" not in str(caught.value)
