"""Merging segments: each entry is there once, at every moment, whatever is killed; and what is not touched."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.journals import Problems, segments

from rolloutmq.messages import ConfigError, InvalidField
from rolloutmq.messages.journal import TORN, Entry, Journal, merge, read
from rolloutmq.messages.journal.segment import Header, Packed, SegmentWriter


def write(folder: Path, writer: str, count: int, *, at: float = 1000.0, complete: bool = True, first: int = 0) -> None:
    """Segments of a writer that is gone, with three entries each; the last one may lack its end."""
    folder.mkdir(exist_ok=True)
    for number in range(first, first + count):
        segment = SegmentWriter(folder, Header(writer, number, at + number))
        notes = [Entry("note", at + number + i / 4, f"{writer}", data={"number": 3 * number + i}) for i in range(3)]
        segment.block([Packed.of([note.pack() for note in notes])])
        segment.close(complete or number < first + count - 1)


def found(folder: Path, **which: Any) -> list[tuple[str, int]]:
    problems: list[str] = []
    told = [(entry.job_id, entry.data["number"]) for entry in read(folder, on_problem=problems.append, **which)]
    assert [problem for problem in problems if not problem.endswith(TORN)] == []
    return told


def test_many_become_one(tmp_path: Path) -> None:
    for number, writer in enumerate(("a", "b", "c")):
        write(tmp_path, writer, 4, at=1000.0 + number / 10, complete=writer != "b")
    before = found(tmp_path)
    seen: list[tuple[int, int]] = []
    told = merge(tmp_path, grace_s=0, progress=lambda done, total: seen.append((done, total)))
    assert (told.merged, told.into, told.deleted, told.dropped, told.left) == (12, 1, 12, 0, {})
    assert seen == [(12, 12)]
    assert len(segments(tmp_path)) == 1
    assert found(tmp_path) == before  # also in this order
    assert found(tmp_path, job="b") == [("b", number) for number in range(12)]
    assert merge(tmp_path, grace_s=0).merged == 0
    write(tmp_path, "d", 2, at=3000.0)
    assert merge(tmp_path, grace_s=0).merged == 3  # what was merged is merged again, as long as it is small
    assert merge(tmp_path, grace_s=0).left == {}
    write(tmp_path, "e", 2, at=4000.0)
    large = merge(tmp_path, grace_s=0, segment_bytes=100)
    assert list(large.left.values()) == ["it is large enough"]
    assert len(found(tmp_path)) == 36 + 6 + 6


def test_killed_at_every_step_each_entry_is_there_once(tmp_path: Path) -> None:
    write(tmp_path / "made", "a", 3)
    write(tmp_path / "made", "b", 2, complete=False)
    script = Path(__file__).with_name("killed_merges.py")
    command = [sys.executable, str(script), str(tmp_path / "made"), str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_who_reads_meanwhile_sees_each_entry_once(tmp_path: Path) -> None:
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 3, at=1000.1)
    before = found(tmp_path)
    reading = (entry.data["number"] for entry in read(tmp_path))
    first = next(reading)
    assert merge(tmp_path).deleted == 0
    assert [first, *reading] == [number for _, number in before]
    assert found(tmp_path) == before  # both are there, what was merged and what it was merged from
    assert len(segments(tmp_path)) == 7
    told = merge(tmp_path)
    assert (told.merged, told.deleted, list(told.left.values())) == (0, 0, ["what it replaces is not deleted yet"])
    assert merge(tmp_path, grace_s=0).deleted == 6
    assert found(tmp_path) == before
    assert len(segments(tmp_path)) == 1


def test_a_writer_that_is_there_keeps_its_segment(tmp_path: Path) -> None:
    with Journal(tmp_path, segment_bytes=1) as journal:
        for number in range(4):
            journal.note("live", number=number)
            journal.flush()
        told = merge(tmp_path, grace_s=0)
        assert (told.merged, list(told.left.values())) == (3, ["its writer is there"])
        journal.note("live", number=4)
    assert found(tmp_path) == [("live", number) for number in range(5)]


def test_a_segment_without_an_end_has_to_be_untouched_for_a_while(tmp_path: Path) -> None:
    write(tmp_path, "a", 2, complete=False)
    assert list(merge(tmp_path).left.values()) == ["it was written to a moment ago"]
    for path in segments(tmp_path):
        os.utime(path, (1, time.time() - 4000))
    assert merge(tmp_path).merged == 2


def test_damage_is_left_where_it_is(tmp_path: Path, problems: Problems) -> None:
    write(tmp_path, "a", 3)
    write(tmp_path, "b", 3)
    damaged = next(path for path in segments(tmp_path) if "-a-000001" in path.name)
    content = bytearray(damaged.read_bytes())
    content[content.index(b"(\xb5\x2f\xfd", 10) + 12] ^= 255
    damaged.write_bytes(content)
    before = sorted((entry.job_id, entry.data["number"]) for entry in read(tmp_path, on_problem=problems))
    told = merge(tmp_path, grace_s=0)
    assert told.merged == 3  # all of b
    assert list(told.left) == [damaged.name]
    assert damaged.read_bytes() == content
    after = sorted((entry.job_id, entry.data["number"]) for entry in read(tmp_path, on_problem=problems))
    assert after == before
    assert len(before) == 15


def test_what_is_not_wanted_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "a", 2, at=1000.0)
    write(tmp_path, "b", 3, at=2000.0)
    told = merge(tmp_path, since=2000.1, change=lambda entry: None if entry.data["number"] == 4 else entry, grace_s=0)
    assert (told.deleted, told.merged, told.dropped) == (2 + 3, 3, 2)
    assert found(tmp_path) == [("b", number) for number in (1, 2, 3, 5, 6, 7, 8)]
    write(tmp_path, "c", 2, at=3000.0)
    told = merge(tmp_path, change=lambda _: None, grace_s=0)
    assert (told.deleted, told.merged, found(tmp_path)) == (3, 0, [])
    assert segments(tmp_path) == []


def test_age_is_that_of_the_entries(tmp_path: Path) -> None:
    """A journal that deletes by age must not take what was merged for new."""
    write(tmp_path, "a", 2)
    for path in segments(tmp_path):
        os.utime(path, (5000, 5000))
    merge(tmp_path, grace_s=0)
    (left,) = segments(tmp_path)
    assert left.stat().st_mtime == 5000
    Journal(tmp_path, keep_s=3600).close()
    assert not left.exists()


def test_one_at_a_time_and_bad_arguments(tmp_path: Path) -> None:
    write(tmp_path, "a", 2)

    def again(_done: int, _total: int) -> None:
        with pytest.raises(ConfigError, match="being merged already"):
            merge(tmp_path)

    assert merge(tmp_path, progress=again).merged == 2
    with pytest.raises(ConfigError, match="no such folder"):
        merge(tmp_path / "none")
    for bad in ({"segment_bytes": 0}, {"grace_s": -1.0}, {"grace_s": math.nan}):
        with pytest.raises(InvalidField):
            merge(tmp_path, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../precious.journal.zst", "notes.txt", "/etc/passwd", 7])
def test_a_forged_header_deletes_nothing_else(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "journal"
    write(folder, "a", 2)
    (tmp_path / "precious.journal.zst").touch()
    (folder / "notes.txt").touch()
    forged = SegmentWriter(folder, Header("mergedx", 0, 1.0, (name,)))
    forged.close()
    told = merge(folder, grace_s=0)
    assert told.left == {forged.path.name: "a segment whose header is damaged"}
    assert (tmp_path / "precious.journal.zst").exists()
    assert (folder / "notes.txt").exists()
