"""What is damaged in a journal, or newer than its reader: it is told, and costs nothing else."""

from __future__ import annotations

import struct
from pathlib import Path

import msgpack
import pytest
import zstandard
from support.journals import Problems, segments
from support.specimens.messages import job

from rolloutmq.messages import (
    UnsupportedVersion,
    encode,
    new_id,
)
from rolloutmq.messages.journal import SUFFIX, Entry, Journal, read, segment


def written(folder: Path, count: int = 5) -> list[str]:
    """Ids of jobs in blocks of their own, in one segment."""
    jobs = [job() for _ in range(count)]
    with Journal(folder) as journal:
        for one in jobs:
            journal.job(one)
            journal.flush(30)
    return [one.id for one in jobs]


def test_an_entry_that_cannot_be_written_is_lost_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block, bad = segment.SegmentWriter.block, [True]

    def fail_once(it: segment.SegmentWriter, packed: list[dict[str, object]]) -> None:
        if bad.pop() if bad else False:
            raise ValueError("of a kind that nobody expected")
        block(it, packed)

    monkeypatch.setattr(segment.SegmentWriter, "block", fail_once)
    with Journal(tmp_path) as journal:
        journal.job(job())
        assert journal.flush(30)
        journal.note("after")
    entries = list(read(tmp_path))
    assert [(entry.event, entry.job_id, entry.data) for entry in entries] in (
        [("lost", "", {"entries": 1}), ("note", "after", {})],
        [("note", "after", {}), ("lost", "", {"entries": 1})],
    )
    assert "nobody expected" in caplog.text


@pytest.mark.parametrize("complete", [True, False])
def test_every_end_leaves_what_is_before_it(tmp_path: Path, complete: bool) -> None:
    """Cut off at each byte: what is read is a beginning of what was written, and nothing else."""
    ids = written(tmp_path / "whole", 3)
    (path,) = segments(tmp_path / "whole")
    data = path.read_bytes()
    with path.open("rb") as file:
        index = segment.Index.read(file)
    end = len(data) if complete else int(index.offsets[-1]) + 10
    (tmp_path / "torn").mkdir()
    torn = tmp_path / "torn" / path.name
    for size in range(0, end, 1 if not complete else 7):
        torn.write_bytes(data[:size])
        problems = Problems()
        found = [entry.job_id for entry in read(tmp_path / "torn", on_problem=problems)]
        whole = sum(size >= place for place in (*map(int, index.offsets[1:]), _after_blocks(data)))
        assert found == ids[:whole]
        assert problems, size  # that it has no end, or that it ends in the midst of a block


def _after_blocks(data: bytes) -> int:
    return data.rindex((0x184D2A5A).to_bytes(4, "little"))


def test_a_damaged_block_costs_what_is_in_it(tmp_path: Path, problems: Problems) -> None:
    ids = written(tmp_path)
    (path,) = segments(tmp_path)
    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        index = segment.Index.read(file)
    data[int(index.offsets[3]) - 1] ^= 0xFF  # the checksum of block 2
    path.write_bytes(data)
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ids[:2] + ids[3:]
    (told,) = problems
    assert path.name in told
    assert "damaged" in told


def test_strange_files_and_missing_segments_are_told(tmp_path: Path, problems: Problems) -> None:
    with Journal(tmp_path, segment_bytes=10) as journal:
        for _ in range(4):
            journal.job(job())
            journal.flush(30)
    first = segments(tmp_path)[0]
    first.unlink()  # retention does that
    assert len(list(read(tmp_path, on_problem=problems))) == 3
    assert problems == []
    segments(tmp_path)[1].unlink()
    (tmp_path / f"notes{SUFFIX}").write_text("of mine")
    (tmp_path / f"0-x-0{SUFFIX}").write_text("garbage")
    (tmp_path / f"1-y-0{SUFFIX}").write_bytes(zstandard.compress(msgpack.packb({"format": "another"})))
    (tmp_path / f"2-z-0{SUFFIX}").write_bytes(b"")
    assert len(list(read(tmp_path, on_problem=problems))) == 2
    assert len(problems) == 6
    assert any("segments are missing: 2" in told for told in problems)


def test_versions_of_the_format(tmp_path: Path, problems: Problems) -> None:
    """A newer minor version is read as far as it is known, another major one is left out; both are told."""
    entry = Entry("note", 1.0, "known", data={"reward": 1}).pack()
    for minor, major in ((7, 1), (0, 2)):
        header = {"format": "rolloutmq-journal", "major": major, "minor": minor, "writer": "w", "number": 0, "at": 1.0}
        unknown = {"e": "smell", "t": 1.0}
        blocks = [header, [entry | {"new": 3}, unknown]]
        (tmp_path / f"1-w{major}-0{SUFFIX}").write_bytes(
            b"".join(zstandard.compress(msgpack.packb(it)) for it in blocks)
        )
    (found,) = read(tmp_path, on_problem=problems)
    assert (found.job_id, found.data) == ("known", {"reward": 1})
    assert sorted("minor" in told or "2.0" in told or "smell" in told for told in problems) == [True] * 3


def test_entries_of_an_unknown_kind_are_told_once_and_those_behind_them_are_read(
    tmp_path: Path, problems: Problems
) -> None:
    unknown, known = {"e": "smell", "t": 1.0}, [Entry("note", 1.0 + i, f"known{i}").pack() for i in range(3)]
    header = {"format": "rolloutmq-journal", "major": 1, "minor": 7, "writer": "w", "number": 0, "at": 1.0}
    blocks = [header, [known[0], *[unknown] * 50, known[1]], [unknown, known[2]]]
    (tmp_path / f"1-w-0{SUFFIX}").write_bytes(b"".join(zstandard.compress(msgpack.packb(it)) for it in blocks))
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["known0", "known1", "known2"]
    assert sum("smell" in told for told in problems) == 1


def test_a_frame_of_a_newer_major_version_costs_its_content_alone(journal: Journal) -> None:
    one = job()
    journal.job(one, b"\x02" + encode(one)[1:])
    journal.flush(30)
    (entry,) = read(journal.folder, job=one.id)
    assert (entry.event, entry.group_id) == ("job", one.group)
    with pytest.raises(UnsupportedVersion, match="upgrade"):
        _ = entry.message


def test_a_segment_with_an_index_of_another_form_is_read_without_it(tmp_path: Path, problems: Problems) -> None:
    header = {"format": "rolloutmq-journal", "major": 1, "minor": 0, "writer": "w", "number": 0, "at": 1.0}
    one, other = (Entry("note", 1.0, new_id()) for _ in range(2))
    frames = [zstandard.compress(msgpack.packb(it)) for it in (header, [one.pack()], [other.pack()])]
    body = msgpack.packb({"offsets": b"", "firsts": b"", "lasts": b"", "jobs": b"", "blocks": b""})
    index = struct.pack("<II", 0x184D2A5A, len(body) + 12) + body + struct.pack("<I8s", len(body), b"rmqindex")
    (tmp_path / f"1-w-0{SUFFIX}").write_bytes(b"".join(frames) + index)
    assert [entry.job_id for entry in read(tmp_path, job=other.job_id, on_problem=problems)] == [other.job_id]
    (told,) = problems
    assert "its index is damaged" in told


@pytest.mark.parametrize(
    "block",
    [
        5,
        {},
        [5],
        [{"e": "job"}],
        [{"e": "job", "t": "late"}],
        [{"e": 7, "t": 1.0}],
        [{"e": "note", "t": 1.0, "j": b"\xff"}],
        [{"e": "note", "t": 1.0, "v": ["one"]}],
        [{"e": "note", "t": 1.0, "m": "text"}],
        [{"e": "note", "t": 1.0, "d": []}],
        [{"e": "note", "t": 1.0, "s": True}],
        [{"e": "note", "t": 1.0, "d": {"x": {"__array__": "<f4", "shape": [2], "bytes": b"1234"}}}],
        [{"e": "note", "t": 1.0, "d": {"x": {"__array__": "O", "shape": [1], "bytes": b"12345678"}}}],
        [{"e": "note", "t": 1.0, "d": {"x": {"__array__": ["<f4"], "shape": "2"}}}],
    ],
)
def test_nothing_in_a_block_stops_the_reader(tmp_path: Path, problems: Problems, block: object) -> None:
    header = {"format": "rolloutmq-journal", "major": 1, "minor": 0, "writer": "w", "number": 0, "at": 1.0}
    good = [Entry("note", 2.0, "good").pack()]
    frames = (zstandard.compress(msgpack.packb(it)) for it in (header, block, good))
    (tmp_path / f"1-w-0{SUFFIX}").write_bytes(b"".join(frames))
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["good"]
    assert len(problems) == 1


def test_a_bomb_is_not_unpacked(tmp_path: Path, problems: Problems) -> None:
    header = {"format": "rolloutmq-journal", "major": 1, "minor": 0, "writer": "w", "number": 0, "at": 1.0}
    bomb = zstandard.compress(bytes(segment.MAX_BLOCK + 1))
    (tmp_path / f"1-w-0{SUFFIX}").write_bytes(zstandard.compress(msgpack.packb(header)) + bomb)
    assert list(read(tmp_path, on_problem=problems)) == []
    assert "bytes" in problems[0]
