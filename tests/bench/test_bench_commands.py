"""Whatever a benchmark's command is given, it ends with one line that names what is wrong, and without a traceback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import engine
from benchmarks.__main__ import app
from benchmarks.scale import bench as scale
from benchmarks.sync import bench as sync

LONG = "x" * 300


def refused(arguments: Sequence[str], named: Sequence[str]) -> None:
    ended = CliRunner().invoke(app, list(arguments))
    assert isinstance(ended.exception, SystemExit), ended.exception
    assert ended.exit_code == 2
    *usage, line = ended.stderr.strip().splitlines()
    assert not usage or usage[0].startswith("Usage:")
    assert [name for name in named if name not in line] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("engine --shape 9t", ["9t"]),
        ("engine --rounds 0", ["--rounds"]),
        ("queue --seconds nan", ["--seconds"]),
        ("queue --peers x", ["x", "rq"]),
        ("queue --peers none --growth-workers 1,x", ["--growth-workers"]),
        ("queue --peers none --growth-workers 0", ["--growth-workers"]),
        (f"queue --growth-workers {'9' * 5000}", ["--growth-workers"]),
        ("sync --shapes 7b", ["7b"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_option(arguments: str, named: Sequence[str]) -> None:
    refused(arguments.split(), named)


def test_options_are_the_fields_of_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[object] = []
    monkeypatch.setattr("benchmarks.__main__.run", lambda plan, out, quiet: ran.append((plan, out, quiet)))
    out = tmp_path / "o"
    for arguments in ("sync --no-graphs --json", f"engine --sglang a=1 --out {out}", "scale fleet.toml --kill 3"):
        assert CliRunner().invoke(app, arguments.split()).exit_code == 0
    assert ran == [
        (sync.Plan(graphs=False), None, True),
        (engine.Plan(sglang=["a=1"]), out, False),
        (scale.Plan(Path("fleet.toml"), kill=3), None, False),
    ]


@pytest.mark.parametrize("command", ["queue --peers none", "sync --device cpu --shapes tiny"])
@pytest.mark.parametrize("out", ["/proc/none/o", "/dev/null/o", f"{__file__}/o", "/tmp", f"{LONG}/o", LONG])
def test_a_place_that_cannot_be_written(command: str, out: str) -> None:
    refused([*command.split(), "--out", out], ["InvalidField: --out=", out[:40]])
