"""`rolloutmq replay` passes over no option: what does not fit together is refused before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import app


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("score --pool default", "--pool: replay score does not take it"),
        ("bisect --by score --pool default", "--pool: replay bisect does not take it"),
        ("schedule --html page.html", "--html: replay schedule does not take it"),
        ("queued --html page.html", "--html: replay queued does not take it"),
        ("queued --where reward<0", "--where: replay queued does not take it"),
        (f"queued {'a' * 32}", "ID: replay queued does not take it"),
        ("queued --since 90m", "--since: replay queued does not take it"),
        ("follow --limit 10", "--limit: replay follow does not take it"),
        ("schedule --version 0", "--version: replay schedule does not take it"),
        ("tokens --by score", "--by: replay tokens does not take it"),
        ("books --journal out", "--journal: replay books does not take it"),
        ("books", "replay books: give one file"),
        ("tokens", "--journal: give the folder of a journal"),
        ("bisected", "one of tokens, score, follow, bisect, loss, schedule, queued, books"),
    ],
)
def test_options_that_do_not_fit_together(
    options: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["replay", *options.split()])
    assert (shown.exit_code, says in shown.output) == (2, True), shown.output
    assert not (tmp_path / "page.html").exists()
