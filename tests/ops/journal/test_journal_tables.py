"""A journal as Parquet: what pandas and pyarrow read back, with notes joined, in bounded batches."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.lazily import Lazily
from support.specimens.messages import result
from typer.testing import CliRunner

from rolloutmq import GenerateJob, SamplingParams
from rolloutmq.messages import RolloutResult, Segment
from rolloutmq.messages.journal import Entry, Journal
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.journal import as_reader, table

pandas, pa, parquet = Lazily("pandas"), Lazily("pyarrow"), Lazily("pyarrow.parquet")
JOB = GenerateJob(
    id="a" * 32, token_ids=[5, 6], n=3, reply_to="me", group_id="g", seed=7, sampling=SamplingParams(temperature=0.5)
)


def sample(number: int, **more: Any) -> RolloutResult:
    told = {"token_ids": [1, 2, 3], "logprobs": [-0.5, -1.0, -1.5], "segments": [Segment(3, 1), Segment(4, 2)]}
    return result(JOB, number, **told | more)


def run(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, list(map(str, arguments)))
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.stdout, ended.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "journal"
    with Journal(place) as journal:
        journal.job(JOB)
        journal.outcome(sample(0), "me")
        journal.outcome(sample(1, logprobs=None, finish_reason="stop"), "me")
        journal.outcome(sample(0), "me")  # again
        journal.add(Entry("result", 10.0, "b" * 32, "me", sample=0, attempt=1))  # redacted
        journal.note(JOB.id, run="night")
        journal.note((JOB.id, 0, 1), reward=1, mask=np.array([1.0, 0.0, 1.0]), odd=1, why={"deep": [1]}, ok=True)
        journal.note((JOB.id, 0, 1), reward=0.5, trained=7)
        journal.note((JOB.id, 1, 1), reward=-1.0, odd="text", trained=None)
    return place


def test_pandas_reads_samples_with_their_notes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out" / "samples.parquet"
    code, shown, said = run("journal", "export", folder, file)
    assert (code, "wrote 2 samples" in shown) == (0, True)
    assert "written without its content" in said
    frame = pandas.read_parquet(file)
    assert frame["sample"].tolist() == [0, 1]
    assert frame.note_reward.tolist() == [0.5, -1.0]
    assert frame.note_run.tolist() == ["night", "night"]
    assert frame.note_odd.tolist() == ["1", '"text"'], "values of several kinds are JSON"
    assert (json.loads(frame.note_why[0]), frame.note_ok[0], frame.note_trained[0]) == ({"deep": [1]}, True, 7)
    assert frame.versions[0].tolist() == [3, 4, 4]
    assert (frame.oldest_version[0], frame.newest_version[0], frame.seed[0]) == (3, 4, 7)
    assert (frame.prompt_ids[0].tolist(), json.loads(frame.sampling[0])) == ([5, 6], {"temperature": 0.5})
    assert frame.logprobs[1] is None
    assert str(frame["time"].dtype).endswith("UTC]")


def test_columns_have_types(folder: Path, tmp_path: Path) -> None:
    run("journal", "export", folder, tmp_path / "s.parquet")
    schema = parquet.read_schema(tmp_path / "s.parquet")
    kinds = {"token_ids": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int64())}
    kinds |= {"note_reward": pa.float64(), "note_trained": pa.int64(), "note_mask": pa.list_(pa.float32())}
    kinds |= {"note_ok": pa.bool_(), "note_run": pa.string(), "time": pa.timestamp("us", "UTC")}
    plain = {name: schema.field(name).type for name in kinds}
    assert {name: str(kind).replace("element", "item") for name, kind in plain.items()} == {
        name: str(kind).replace("element", "item") for name, kind in kinds.items()
    }


def test_events_are_every_entry(folder: Path, tmp_path: Path) -> None:
    assert run("journal", "export", folder, tmp_path / "e.parquet", "--table", "events", "--json")[0] == 0
    rows = parquet.read_table(tmp_path / "e.parquet").to_pylist()
    assert [row["event"] for row in rows] == ["job"] + ["result"] * 4 + ["note"] * 4
    assert json.loads(rows[-1]["data"]) == {"reward": -1.0, "odd": "text", "trained": None}
    assert rows[1]["versions"] == [3, 4]


def test_batches_are_bounded_by_rows_and_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet: list[str] = []
    for name, value in (("BATCH_ROWS", 1), ("BATCH_TOKENS", 3)):
        with monkeypatch.context() as patched:
            patched.setattr(table, name, value)
            assert [batch.num_rows for batch in as_reader(folder, on_problem=quiet.append)] == [1, 1]


def test_filters_choose_and_notes_still_join(folder: Path) -> None:
    chosen = as_reader(folder, on_problem=print, version=4, job=[JOB.id]).read_all()
    assert chosen.column("note_reward").to_pylist() == [0.5, -1.0]
    assert as_reader(folder, on_problem=print, client="nobody").read_all().num_rows == 0


def test_another_thread_may_read_the_batches(folder: Path) -> None:
    """As DuckDB does."""
    reader = as_reader(folder, on_problem=lambda _: None)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(reader.read_all).result().num_rows == 2


def test_a_file_is_never_half(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "s.parquet"
    run("journal", "export", folder, file)
    before = file.read_bytes()
    code, _, said = run("journal", "export", folder, file)
    assert (code, "--overwrite" in said) == (2, True)
    monkeypatch.setattr(table, "_own", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    code, _, said = run("journal", "export", folder, file, "--overwrite")
    assert (code, "disk full" in said, file.read_bytes() == before) == (2, True, True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["s.parquet"]
    assert run("journal", "export", folder, file, "--table", "smell")[0] == 2


def test_too_many_names_of_notes_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "NOTE_COLUMNS", 2)
    told: list[str] = []
    found = as_reader(folder, on_problem=told.append).read_all()
    assert [name for name in found.column_names if name.startswith("note_")] == ["note_reward", "note_run"]
    assert any("more than 2 names" in line for line in told)


def test_without_pyarrow_it_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, said = run("journal", "export", folder, tmp_path / "s.parquet")
    assert (code, "rolloutmq[parquet]" in said) == (2, True)


def test_a_process_that_has_not_imported_pyarrow_exports(folder: Path, tmp_path: Path) -> None:
    script = "import sys, pathlib; from rolloutmq.ops.journal import export; "
    script += "print(export(sys.argv[1], pathlib.Path(sys.argv[2]), on_problem=lambda _: None))"
    arguments = [sys.executable, "-c", script, str(folder), str(tmp_path / "s.parquet")]
    assert subprocess.run(arguments, capture_output=True, text=True, check=True).stdout == "2\n"
