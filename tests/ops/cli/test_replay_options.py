"""`rolloutmq replay` passes over no option: what does not fit together is refused before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import app


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--score --score-every 5", "--score-every and --score: give one of them"),
        ("--bisect --depth schedule", "--bisect and --depth schedule: give one of them"),
        ("--queued --score", "--queued and --score: give one of them"),
        ("--score --pool default", "--pool: nothing is generated in a pool with --score"),
        ("--bisect --score --pool default", "--pool: nothing is generated in a pool with --bisect and --score"),
        ("--depth schedule --html page.html", "--html: there is no report with --depth schedule"),
        ("--queued --html page.html", "--html: there is no report with --queued"),
        ("--queued --where reward<0", "--where: --queued takes no such choice"),
        (f"--queued {'a' * 32}", "ID: --queued takes no such choice"),
        ("--queued --since 90m", "--since: --queued takes no such choice"),
        ("--score-every 5 --limit 10", "--limit: --score-every takes no such choice"),
        ("--depth schedule --version 0", "--version: --depth schedule takes no such choice"),
    ],
)
def test_options_that_do_not_fit_together(
    options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["replay", "--journal", str(tmp_path), *options.split()])
    assert (shown.exit_code, says in shown.output) == (2, True), shown.output
    assert not (tmp_path / "page.html").exists()
