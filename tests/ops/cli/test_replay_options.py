"""`rolloutmq replay` passes over no option: what does not fit together is refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.specimens.messages import result
from typer.testing import CliRunner

from rolloutmq.messages import GenerateJob
from rolloutmq.messages.journal import Journal
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


def test_what_needs_no_model_is_asked_of_a_journal_alone(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for version in range(3):
            job = GenerateJob(id=f"{version:032x}", token_ids=[5], n=1, reply_to="me")
            journal.job(job)
            journal.outcome(result(job, 0, token_ids=[7], logprobs=[-1.0], segments=[(version, 1)]), "me")
            journal.note((job.id, 0, 1), reward=1.0 - version)

    def told(*arguments: str) -> dict[str, object]:
        shown = CliRunner().invoke(app, ["replay", *arguments, "--journal", str(tmp_path), "--json"])
        assert shown.exit_code == 0, shown.output
        (line,) = map(json.loads, shown.stdout.splitlines())
        return line

    found = told("bisect", "--by", "reward < 0.2")
    assert (found["good"], found["broken"], found["tested"]) == (0, 1, {"0": False, "1": True, "2": True})
    seen = told("schedule", f"{1:032x}")
    assert (seen["outcomes"], seen["violations"]) == ({"result": 1}, [])
