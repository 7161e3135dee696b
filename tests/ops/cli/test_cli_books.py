"""`rolloutmq replay books`: what people see, what programs get, and files that are not books."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import app
from rolloutmq.producer.training import Books, Measured


def run(*arguments: str) -> tuple[int, str, str]:
    ended = CliRunner().invoke(app, list(arguments))
    return ended.exit_code, ended.stdout, ended.stderr


@pytest.fixture
def books() -> Books:
    books = Books()
    for number in range(3):
        books.accept(2)
        books.train(number, [0], 5 + number, {0: Measured(100, 1.0, number)})
    books.drop(0, [1], "stale", {1: Measured(900, 0.5)})
    books.drop(1, [1], "failed")
    books.advance(1)
    return books


@pytest.mark.parametrize("form", ["json", "torch", "deep", "trl"])
def test_books_are_found_and_shown(books: Books, tmp_path: Path, form: str) -> None:
    path = tmp_path / "state"
    state = {"books": books.state_dict(), "checkpoint": 3}
    if form == "json":
        path.write_text(json.dumps(state))
    elif form == "trl":  # a checkpoint's folder
        path.mkdir()
        attributes = {"run": "r", "begin": 1, "books": books.state_dict()}
        callbacks = {"PoolRolloutWorker": {"args": {}, "attributes": attributes}}
        (path / "trainer_state.json").write_text(json.dumps({"global_step": 5, "stateful_callbacks": callbacks}))
    else:
        torch.save({"model": {"w": torch.ones(2)}, "rollouts": state} if form == "deep" else state, path)
    code, shown, _ = run("replay", "books", str(path))
    assert code == 0
    assert "6 samples of 3 prompts were accepted: 3 trained + 2 dropped + 1 in flight" in shown
    assert "staleness of what was trained: 0: 1, 1: 1, 2: 1" in shown
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[-3:]}
    assert lines["trained"][:3] == ["3", "50.0%", "100"]
    assert lines["stale"][:3] == ["1", "16.7%", "900"]
    assert lines["failed"][2:] == ["-"] * 9
    code, shown, _ = run("replay", "books", str(path), "--json")
    assert json.loads(shown) == json.loads(json.dumps(books.report()))


def test_a_folder_without_books_is_told_what_to_give(tmp_path: Path) -> None:
    code, _, told = run("replay", "books", str(tmp_path))
    assert code == 2
    assert "a file, or a checkpoint's folder that has trainer_state.json" in " ".join(told.split())


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (Path("harmed"), "x"))


@pytest.mark.parametrize("content", ["text", "empty", "pickle", "other", "broken", "missing"])
def test_what_is_no_books_is_refused_in_one_line(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("state")
    if content == "pickle":
        torch.save({"books": Evil()}, path)
    elif content != "missing":
        given = {"text": "hello", "empty": "", "other": '{"a": [1]}'}
        broken = json.dumps(books.state_dict() | {"trained": 7})
        path.write_text(given.get(content, broken))
    code, _, error = run("replay", "books", "state")
    assert code == 2
    assert error.startswith("InvalidField: ")
    assert len(error.splitlines()) == 1
    assert content != "pickle" or error.endswith("as JSON in a file of its own\n"), "what to do instead"
    assert not Path("harmed").exists()
