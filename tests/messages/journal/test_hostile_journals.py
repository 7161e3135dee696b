"""What somebody else has put into a journal's folder: it is told, stops no reader, and costs nothing else."""

from __future__ import annotations

import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from support.journals import Problems, segments

from rolloutmq.messages import ConfigError, InvalidField
from rolloutmq.messages.journal import SUFFIX, Entry, Journal, merge, read

ENTRY = {"t": 1.0, "e": "note", "j": "good"}


def frame(value: Any) -> bytes:
    data: bytes = zstandard.ZstdCompressor(write_checksum=True, write_content_size=True).compress(msgpack.packb(value))
    return data


def put(
    folder: Path, *entries: Any, name: str = "00000000001000-foreign-000000", end: bytes = b"", **header: Any
) -> Path:
    """A segment that nobody of ours would write."""
    told = {"format": "rolloutmq-journal", "major": 1, "minor": 1, "writer": "foreign", "number": 0, "at": 1.0} | header
    path = folder / f"{name}{SUFFIX}"
    path.write_bytes(frame(told) + (frame(list(entries)) if entries else b"") + end)
    return path


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"t": float("inf")}, "whose at is inf"),
        ({"t": float("nan")}, "whose at is nan"),
        ({"t": -1e14}, "whose at is"),
        ({"s": 1 << 31}, "whose sample is"),
        ({"a": 1 << 63}, "whose attempt is"),
        ({"v": [1 << 63]}, "whose versions are"),
        ({"d": {"x": nested(300)}}, "nested deeper than 64"),
        ({"d": {"x": {"__array__": "i4,(", "shape": [1], "bytes": b"1234"}}}, "an array that cannot be read"),
        ({"d": {"x": {"__array__": "f16", "shape": [1], "bytes": bytes(16)}}}, "an array that cannot be read"),
        ({"d": {"x": {"__array__": ["f4"], "shape": [1], "bytes": bytes(4)}}}, "an array that cannot be read"),
    ],
)
def test_an_entry_that_nobody_can_show_is_left_out(tmp_path: Path, bad: dict[str, Any], told: str) -> None:
    put(tmp_path, ENTRY | bad, ENTRY)
    problems = Problems()
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["good"]
    (problem,) = problems
    assert told in problem


def test_a_note_that_no_reader_would_take_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(InvalidField, match="at most 64 deep"):
        journal.note("job", x=nested(100))


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path, ENTRY)
    os.mkfifo(tmp_path / f"1-pipe-000000{SUFFIX}")
    (tmp_path / f"1-device-000000{SUFFIX}").symlink_to("/dev/zero")
    (tmp_path / f"1-nowhere-000000{SUFFIX}").symlink_to(tmp_path / "nowhere")
    problems = Problems()
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["good"]
    assert len(problems) == 3


def test_a_gap_between_numbers_costs_nothing_however_large(tmp_path: Path) -> None:
    put(tmp_path, ENTRY)
    put(tmp_path, name="00000000001000-foreign-99999999999999")
    problems = Problems()
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["good"]
    assert any("segments are missing: 1 to 99999999999998" in problem for problem in problems)


def test_an_index_that_points_before_the_file_is_no_index(tmp_path: Path) -> None:
    moment = struct.pack("<d", 1.0)
    arrays = {"offsets": struct.pack("<q", -5), "firsts": moment, "lasts": moment, "ids": b"", "blocks": b""}
    body = msgpack.packb(arrays)
    end = struct.pack("<II", 0x184D2A5A, len(body) + 12) + body + struct.pack("<I8s", len(body), b"rmqindex")
    put(tmp_path, ENTRY, end=end)
    assert [entry.job_id for entry in read(tmp_path, on_problem=Problems())] == ["good"]


def test_a_segment_cannot_replace_itself(tmp_path: Path) -> None:
    path = put(
        tmp_path, ENTRY, name="00000000001000-merged1-000000", replaces=[f"00000000001000-merged1-000000{SUFFIX}"]
    )
    assert [entry.job_id for entry in read(tmp_path)] == ["good"]
    merge(tmp_path, grace_s=0.0)
    assert path.exists()


@pytest.mark.parametrize("name", ["x" * 300 + SUFFIX, f"a\0b{SUFFIX}", f"../a{SUFFIX}"])
def test_a_name_that_no_file_can_have_is_replaced_by_nothing(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, ENTRY, name="00000000001000-merged1-000000", replaces=[name])
    merge(tmp_path, grace_s=0.0)
    assert path.exists()


def test_merging_leaves_files_with_other_names(tmp_path: Path) -> None:
    for name in ("yesterday-foreign-000000", f"{'9' * 200}-foreign-000001"):
        put(tmp_path, ENTRY, name=name)
    for _ in range(2):
        with Journal(tmp_path) as journal:
            journal.add(Entry("note", 2.0, "ours"))
    told = merge(tmp_path, grace_s=0.0)
    assert (told.merged, set(told.left.values())) == (2, {"not the name of a segment"})
    assert sorted(entry.job_id for entry in read(tmp_path)) == ["good", "good", "ours", "ours"]


def test_a_folder_that_this_user_may_not_read_is_not_an_empty_one() -> None:
    """Path.glob finds nothing in such a folder, and says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        place = Path(folder) / "journal"
        place.mkdir()
        place.chmod(0o000)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            with pytest.raises(ConfigError, match="may not read"):
                read(place)
        finally:
            os.seteuid(user)
            place.chmod(0o700)


def test_a_disk_that_fails_in_the_middle_ends_one_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolloutmq.messages.journal.segment import SegmentReader  # noqa: PLC0415

    put(tmp_path, ENTRY)
    with Journal(tmp_path) as journal:
        journal.note("ours")
    (foreign,) = [path for path in segments(tmp_path) if "foreign" in path.name]
    frames = SegmentReader._frame

    def failing(it: SegmentReader, start: int, *more: int) -> tuple[bytes | None, str]:
        if it._path == foreign and start:
            raise OSError(5, "Input/output error")
        return frames(it, start, *more)

    monkeypatch.setattr(SegmentReader, "_frame", failing)
    problems = Problems()
    assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["ours"]
    assert any("Input/output error; the rest of it is left out" in problem for problem in problems)


@pytest.mark.parametrize("inside", [[], {}, 0])
def test_a_small_block_does_not_become_large_in_memory(tmp_path: Path, inside: Any) -> None:
    put(tmp_path, ENTRY)
    put(tmp_path, *[inside] * 3_000_000, name="00000000002000-foreign-000001")
    problems = Problems()
    tracemalloc.start()
    try:
        assert [entry.job_id for entry in read(tmp_path, on_problem=problems)] == ["good"]
        assert tracemalloc.get_traced_memory()[1] < 150_000_000  # twice as much where all of it is read
    finally:
        tracemalloc.stop()
    assert any("more than 2097152 elements" in told or "exceeds max_array_len" in told for told in problems)


def test_a_note_of_more_than_a_reader_takes_is_refused(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        with pytest.raises(InvalidField, match="at most 1048576 elements"):
            journal.note("job", x=[[0] * 1024] * 1024)
        journal.note("job", x=np.zeros(1 << 21, np.uint8))
    assert [entry.data["x"].size for entry in read(tmp_path)] == [1 << 21]
