"""A journal from writer to reader: what is written is read, and what is damaged is told and costs nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
import zstandard
from support.journals import Problems, segments
from support.specimens.messages import job, result

from rolloutmq.messages import (
    ConfigError,
    InvalidField,
    JobFailure,
    encode,
    new_id,
)
from rolloutmq.messages.journal import SUFFIX, Consumed, Entry, Journal, read, segment
from rolloutmq.messages.journal.segment import SegmentReader


def test_a_run_comes_back_whole(journal: Journal, problems: Problems) -> None:
    one, other = job(group_id="g"), job()
    found = result(one, 0)
    journal.job(one)
    journal.job(other)
    journal.outcome(found, "client")
    journal.outcome(JobFailure(job_id=other.id, outcome="dead", cause="no worker"), "client")
    journal.note((one.id, 0, 1), reward=0.5, mask=[1, 1, 0], step=7)
    assert journal.flush(30)
    entries = list(read(journal.folder, on_problem=problems))
    assert [entry.event for entry in entries] == ["job", "job", "result", "failure", "note"]
    assert entries[0].message == one
    back = entries[2].message
    np.testing.assert_array_equal(back.token_ids, found.token_ids)
    assert encode(back) == encode(found)
    assert (entries[2].versions, entries[2].group_id) == (tuple(sorted({s.version for s in found.segments})), "g")
    assert entries[3].data["cause"] == "no worker"
    assert (entries[4].sample, entries[4].attempt, entries[4].data["mask"]) == (0, 1, [1, 1, 0])
    assert problems == []


def test_frames_are_written_as_they_are(journal: Journal) -> None:
    one = job()
    frame = encode(one)
    journal.job(one, frame)
    journal.flush(30)
    (entry,) = read(journal.folder)
    assert entry.content == frame


def test_batches_are_written_in_their_order_however_large(tmp_path: Path) -> None:
    """More than a block, more entries than one byte of a header counts, and some without their frames."""
    jobs = [job(token_ids=np.arange(20_000) + i) for i in range(20)]
    failure = JobFailure(job_id=jobs[3].id, outcome="cancelled", cause="of mine")
    few = [job() for _ in range(100)]
    for redact in (None, lambda entry: entry):
        folder = tmp_path / str(redact is None)
        with Journal(folder, redact=redact) as journal:
            journal.jobs(jobs, [encode(one) for one in jobs])
            journal.jobs(few, [encode(one) if i % 7 else None for i, one in enumerate(few)])
            journal.outcomes([result(few[0]), failure], "client", [None, None])
            journal.consumed([Consumed.of(result(few[0])), Consumed.of(failure)], "client")
        entries = list(read(folder))
        assert [entry.message for entry in entries[:120]] == [*jobs, *few]
        assert [entry.event for entry in entries[120:]] == ["result", "failure", "consumed", "consumed"]
        assert [entry.job_id for entry in entries[120:]] == [few[0].id, jobs[3].id] * 2
        assert (entries[122].sample, entries[122].attempt, entries[123].sample) == (0, 1, -1)
        assert list(read(folder, job=jobs[3].id)) == [entry for entry in entries if entry.job_id == jobs[3].id]


def test_what_is_asked_for_is_found(tmp_path: Path, problems: Problems) -> None:
    """Over several segments, with and without an index, of two writers."""
    jobs = [job(group_id=f"g{i % 3}") for i in range(30)]
    for who, mine in (("a", jobs[:15]), ("b", jobs[15:])):
        with Journal(tmp_path, segment_bytes=600) as journal:
            for one in mine:
                journal.job(one)
                journal.outcome(result(one, 0), who)
                journal.flush(30)
    assert len(segments(tmp_path)) > 6
    everything = list(read(tmp_path, on_problem=problems))
    assert [entry.at for entry in everything] == sorted(entry.at for entry in everything)
    assert len(everything) == 60
    for one in (jobs[0], jobs[14], jobs[29]):
        assert [entry.job_id for entry in read(tmp_path, job=one.id)] == [one.id, one.id]
    assert {entry.job_id for entry in read(tmp_path, job=[jobs[3].id, jobs[20].id])} == {jobs[3].id, jobs[20].id}
    assert len(list(read(tmp_path, client="a", events="result"))) == 15
    assert {entry.job_id for entry in read(tmp_path, group="g1")} == {one.id for one in jobs[1::3]}
    middle = everything[20].at
    assert list(map(str, read(tmp_path, since=middle))) == [str(it) for it in everything if it.at >= middle]
    assert len(list(read(tmp_path, until=middle))) == sum(it.at <= middle for it in everything)
    assert list(read(tmp_path, version=10**6)) == []
    assert len(list(read(tmp_path, version=everything[1].versions[0], events=["result"]))) == 30
    assert list(read(tmp_path, job="none")) == []
    assert problems == []


def test_a_job_is_found_without_reading_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job() for _ in range(40)]
    with Journal(tmp_path) as journal:
        for one in jobs:
            journal.job(one)
            journal.flush(30)
    frames: list[int] = []
    frame = SegmentReader._frame
    monkeypatch.setattr(SegmentReader, "_frame", lambda it, *at: frames.append(1) or frame(it, *at))
    assert len(list(read(tmp_path, job=jobs[20].id))) == 1
    assert len(frames) == 2  # the header and the block


def test_jobs_with_any_id_are_found(tmp_path: Path) -> None:
    """Ids as `new_id` makes them have their own second half as hash, and may stand in a block with others."""
    ids = [new_id(), "mine", new_id().upper(), "x" * 32, " ".join(["ab"] * 11), "é" * 16]
    for several in (ids, ids[:1]):
        with Journal(tmp_path) as journal:
            for one in several:
                journal.note(one, of=one)
    for one in ids:
        assert {entry.data["of"] for entry in read(tmp_path, job=one)} == {one}


def test_arrays_of_a_note_come_back(journal: Journal) -> None:
    mask, gaps = np.array([1, 0, 1], np.uint8), np.linspace(0, 1, 32_768)
    journal.note("of", mask=mask, gaps=gaps, deep=gaps.reshape(2, -1), torch=torch.ones(2), one=np.float64(0.5))
    mask[0] = 9
    journal.flush(30)
    (entry,) = read(journal.folder)
    told = entry.data
    assert (told["mask"].tolist(), told["mask"].dtype, told["one"]) == ([1, 0, 1], np.uint8, 0.5)
    np.testing.assert_array_equal(told["gaps"], gaps.astype(np.float32))
    assert (told["gaps"].dtype, told["deep"].shape, told["torch"].tolist()) == (np.float32, (2, 16_384), [1.0, 1.0])
    assert Entry.unpack(entry.pack()).data["mask"].tolist() == [1, 0, 1]
    for bad in (np.array(["a"]), torch.ones(1, requires_grad=True)):
        with pytest.raises(InvalidField):
            journal.note("of", bad=bad)


def test_any_zstd_reads_it(journal: Journal) -> None:
    journal.job(job())
    journal.close()
    (path,) = segments(journal.folder)
    with path.open("rb") as file:
        plain = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    header, block = _values(plain)
    assert header["format"] == "rolloutmq-journal"
    assert block[0]["e"] == "job"


def _values(plain: bytes) -> Iterator[object]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(plain)
    yield from unpacker


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_a_segment_that_is_complete_makes_room(tmp_path: Path) -> None:
    with Journal(tmp_path, segment_bytes=10, keep_bytes=3000) as journal:
        for _ in range(40):
            journal.job(job())
            journal.flush(30)
    kept = segments(tmp_path)
    assert sum(path.stat().st_size for path in kept) < 4000
    assert kept[-1].name.endswith(f"-{39:06d}{SUFFIX}")
    os.utime(kept[0], (1, 1))
    with Journal(tmp_path, keep_s=1000):
        assert kept[0] not in segments(tmp_path)


def test_a_disk_that_refuses_costs_nothing_that_fits_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from rolloutmq.messages.journal import writer  # noqa: PLC0415

    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    full = [True]
    block = segment.SegmentWriter.block

    def refuse(it: segment.SegmentWriter, packed: list[dict[str, object]]) -> None:
        if full:
            raise OSError(28, "No space left on device")
        block(it, packed)

    monkeypatch.setattr(segment.SegmentWriter, "block", refuse)
    with Journal(tmp_path, buffer_bytes=5000) as journal:
        jobs = [job() for _ in range(40)]
        for one in jobs:
            journal.job(one)
        assert not journal.flush(0.1)
        assert 0 < journal.lost < 40
        full.clear()
        assert journal.flush(30)
        kept = 40 - journal.lost
        entries = list(read(tmp_path, on_problem=Problems()))
        assert [entry.job_id for entry in entries[:-1]] == [one.id for one in jobs[:kept]]
        assert (entries[-1].event, entries[-1].data) == ("lost", {"entries": 40 - kept})
    assert "No space left" in caplog.text


def test_what_a_full_disk_refuses_until_the_end_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(it: segment.SegmentWriter, packed: list[dict[str, object]]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segment.SegmentWriter, "block", refuse)
    with Journal(tmp_path) as journal:
        for _ in range(3):
            journal.job(job())
    assert journal.lost == 3
    assert "No space left on device; 3 entries are lost" in caplog.text


def test_prompts_can_be_left_out(tmp_path: Path) -> None:
    def redact(entry: Entry) -> Entry | None:
        if entry.event == "result":
            raise RuntimeError("of the user's own")
        return None if entry.job_id == hidden.id else entry

    one, hidden = job(), job()
    with Journal(tmp_path, redact=redact) as journal:
        journal.job(one)
        journal.job(hidden)
        journal.outcome(result(one, 0), "client")
    found = list(read(tmp_path))
    assert [(entry.event, entry.job_id, entry.content is None) for entry in found] == [
        ("job", one.id, False),
        ("result", one.id, True),
    ]


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="segment_bytes"):
        Journal(tmp_path, segment_bytes=0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        Journal(tmp_path / "file")
    with pytest.raises(ConfigError, match="no such folder"):
        read(tmp_path / "none")
    with pytest.raises(InvalidField, match="events"):
        read(tmp_path, events="jobs")  # type: ignore[arg-type]
    with Journal(tmp_path / "j") as journal, pytest.raises(InvalidField, match="data"):
        journal.note("job", reward=object())


def test_no_kill_loses_or_invents_an_entry(tmp_path: Path) -> None:
    """A hundred writers, killed at any moment: all that `flush` returned for is there, in order, and nothing else."""
    program = Path(__file__).with_name("killed_writers.py")
    subprocess.run([sys.executable, program, tmp_path], check=True)
    told = [int(count) for count in (tmp_path / "flushed").read_text().split()]
    assert len(told) == 100
    for number, flushed in enumerate(told):
        found = [entry.data["number"] for entry in read(tmp_path / str(number), on_problem=Problems())]
        assert found == list(range(len(found)))
        assert len(found) >= flushed
    assert sum(told) > 1000
