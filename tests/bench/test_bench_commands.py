"""Whatever a benchmark's command is given, it ends with one line that names what is wrong, and without a traceback."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app

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


@pytest.mark.parametrize("command", ["queue --peers none", "sync --device cpu --shapes tiny"])
@pytest.mark.parametrize("out", ["/proc/none/o", "/dev/null/o", f"{__file__}/o", "/tmp", f"{LONG}/o", LONG])
def test_a_place_that_cannot_be_written(command: str, out: str) -> None:
    refused([*command.split(), "--out", out], ["InvalidField: --out=", out[:40]])
