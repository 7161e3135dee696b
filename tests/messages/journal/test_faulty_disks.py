"""Disks that refuse, files that change under their writer, single flipped bits: an entry is read, or named as lost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.journals import Problems, segments

from rolloutmq.messages.journal import Entry, Journal, merge, read, writer
from rolloutmq.messages.journal.segment import SegmentWriter

COUNT = 12


def numbers(folder: Path, problems: Problems | None = None, **which: str) -> list[int]:
    """What is read, each as its number."""
    told = Problems() if problems is None else problems
    return [entry.data["number"] for entry in read(folder, on_problem=told, **which) if entry.event == "note"]


def lost(folder: Path) -> int:
    """How many entries the journal itself says are lost."""
    told = read(folder, events="lost", on_problem=Problems())
    return sum(entry.data["entries"] for entry in told)


class Refusing:
    """Refuses the writes with these numbers, behind some of their bytes."""

    def __init__(self, which: Iterable[int], monkeypatch: pytest.MonkeyPatch, part: float = 0.0) -> None:
        self.calls, self._which, self._part = 0, set(which), part
        self._write = SegmentWriter._write
        monkeypatch.setattr(SegmentWriter, "_write", lambda it, data: self(it, data))  # noqa: PLW0108 – a method
        monkeypatch.setattr(writer, "RETRY_S", 0.002)

    def __call__(self, it: SegmentWriter, data: bytes) -> None:
        self.calls += 1
        if self.calls - 1 in self._which:
            self._write(it, data[: int(len(data) * self._part)])
            raise OSError(28, "No space left on device")
        self._write(it, data)


def write(folder: Path, count: int = COUNT, **limits: int) -> int:
    """So many notes, each in a block of its own. Returns how many the journal says it has lost."""
    with Journal(folder, **{"segment_bytes": 100, **limits}) as journal:  # type: ignore[arg-type]
        for number in range(count):
            journal.note(f"job{number}", number=number)
            journal.flush(30)
    return journal.lost


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_a_write_that_is_refused_costs_nothing_whichever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: float
) -> None:
    counting = Refusing((), monkeypatch)
    assert write(tmp_path / "none") == 0
    assert counting.calls > 2 * COUNT  # headers and indexes among them
    for refused in range(1, counting.calls):  # 0 is the header of the first: then there is no journal at all
        with monkeypatch.context() as patch:
            Refusing({refused, refused + 2}, patch, part)
            folder = tmp_path / f"{refused}"
            gone = write(folder)
        found = numbers(folder)
        assert set(found) == set(range(COUNT)), refused
        assert (gone, lost(folder)) == (0, 0)
        # A block may have come to the disk although the write was refused: then its entries are there twice.
        assert part == 1.0 or len(found) == COUNT


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Refusing(range(7, 10_000), monkeypatch)
    with Journal(tmp_path, segment_bytes=100) as journal:
        for number in range(COUNT):
            journal.note(f"job{number}", number=number)
            journal.flush(0.05)
    found = numbers(tmp_path)
    assert found == list(range(len(found)))
    assert journal.lost == COUNT - len(found) > 0


def test_limits_of_one_writer_spare_what_another_still_writes(tmp_path: Path) -> None:
    with Journal(tmp_path) as other:
        other.note("first", number=100)
        assert other.flush(30)
        write(tmp_path, keep_bytes=1, keep_s=1)
        other.note("second", number=101)
        assert other.flush(30)
    assert other.lost == 0
    assert {100, 101} <= set(numbers(tmp_path))
    assert len(segments(tmp_path)) == 2  # the other one's, and the newest of the writer with limits
    write(tmp_path, keep_bytes=1, keep_s=1)
    assert not {100, 101} & set(numbers(tmp_path))  # it is complete now


def test_a_segment_that_is_deleted_under_its_writer_is_told(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for number in range(3):
            journal.note("gone", number=number)
        assert journal.flush(30)
        (path,) = segments(tmp_path)
        path.unlink()
        journal.note("here", number=3)
        assert journal.flush(30)
        assert journal.lost == 3
        journal.note("here too", number=4)
    assert numbers(tmp_path) == [3, 4]
    assert lost(tmp_path) == 3


def test_segments_of_one_number_are_all_read(tmp_path: Path) -> None:
    """An earlier release gave the number of a segment that it could not begin to the next one too."""
    write(tmp_path, 1)
    (path,) = segments(tmp_path)
    for earlier in (b"", path.read_bytes()[:20]):
        (tmp_path / path.name.replace(path.name[:14], f"{int(path.name[:14]) - len(earlier) - 1:014d}")).write_bytes(
            earlier
        )
    assert len(segments(tmp_path)) == 3
    assert numbers(tmp_path) == [0]


# --- one bit ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete segment of 200 entries in 20 blocks."""
    folder = tmp_path_factory.mktemp("whole")
    with Journal(folder) as journal:
        for block in range(20):
            for number in range(10 * block, 10 * block + 10):
                journal.add(Entry("note", 1000.0 + number, f"{number:032x}", data={"number": number}))
            assert journal.flush(30)
    (path,) = segments(folder)
    return path


@pytest.fixture(params=["complete", "without an end"])
def data(request: pytest.FixtureRequest, whole: Path) -> bytes:
    """The segment's bytes, and those of one whose writer died."""
    found = whole.read_bytes()
    return found if request.param == "complete" else found[: found.rindex((0x184D2A5A).to_bytes(4, "little"))]


def changed(folder: Path, whole: Path, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / whole.name
    path.write_bytes(data)
    return path


def test_a_flipped_bit_costs_a_block_at_most_and_is_named(tmp_path: Path, whole: Path, data: bytes) -> None:
    draw, blocks = random.Random(0), 0
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 1 << draw.randrange(8)
        changed(tmp_path / "bad", whole, bytes(bad))
        problems = Problems()
        found = numbers(tmp_path / "bad", problems)
        told = [it for it in problems if "it has no end" not in it]
        assert found == sorted(set(found))
        missing = set(range(200)) - set(found)
        assert told or not missing, place
        if not any("header" in it or "no segment" in it or "version" in it or "minor" in it for it in told):
            assert len(missing) <= 10, (place, problems)
            blocks += bool(missing)
        if place % 5 == 0:
            one, problems = draw.randrange(200), Problems()
            assert numbers(tmp_path / "bad", problems, job=f"{one:032x}") == [one] or problems, place
    assert blocks > len(data) // 4


def test_every_beginning_is_read_as_far_as_it_goes(tmp_path: Path, whole: Path) -> None:
    data = whole.read_bytes()
    before, blocks = 0, data.rindex((0x184D2A5A).to_bytes(4, "little"))
    for size in (*range(blocks + 20), *range(blocks + 20, len(data), 11), len(data) - 1):
        changed(tmp_path / "cut", whole, data[:size])
        problems = Problems()
        found = numbers(tmp_path / "cut", problems)
        assert found == list(range(len(found)))
        assert len(found) >= before
        before = len(found)
        assert problems, size
    assert before == 200


def test_merging_leaves_what_is_damaged_as_it_is(tmp_path: Path, whole: Path, data: bytes) -> None:
    draw = random.Random(1)
    for place in range(0, len(data), 37):
        bad = bytearray(data)
        bad[place] ^= 1 << draw.randrange(8)
        folder = tmp_path / f"{place}"
        changed(folder, whole, bytes(bad))
        write(folder, 2)
        before = sorted(numbers(folder))
        merge(folder, grace_s=0)
        assert sorted(numbers(folder)) == before, place
