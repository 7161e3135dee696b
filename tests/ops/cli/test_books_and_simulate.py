"""`rolloutmq books` and `rolloutmq simulate`: what people see, what programs get, and files that are not books."""

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
    code, shown, _ = run("books", str(path))
    assert code == 0
    assert "6 samples of 3 prompts were accepted: 3 trained + 2 dropped + 1 in flight" in shown
    assert "staleness of what was trained: 0: 1, 1: 1, 2: 1" in shown
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[-3:]}
    assert lines["trained"][:3] == ["3", "50.0%", "100"]
    assert lines["stale"][:3] == ["1", "16.7%", "900"]
    assert lines["failed"][2:] == ["-"] * 9
    code, shown, _ = run("books", str(path), "--json")
    assert json.loads(shown) == json.loads(json.dumps(books.report()))


def test_a_folder_without_books_is_told_what_to_give(tmp_path: Path) -> None:
    code, _, told = run("books", str(tmp_path))
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
    code, _, error = run("books", "state")
    assert code == 2
    assert error.startswith("InvalidField: ")
    assert len(error.splitlines()) == 1
    assert content != "pickle" or error.endswith("as JSON in a file of its own\n"), "what to do instead"
    assert not Path("harmed").exists()


def test_simulate_prints_draws_and_repeats(tmp_path: Path) -> None:
    plot = tmp_path / "plots" / "staleness.png"
    asked = ("simulate", "staleness", "--etas", "0,2", "--training-steps", "20", "--slots", "64")
    code, shown, _ = run(*asked)
    assert code == 0
    assert [line for line in shown.splitlines() if line.endswith(":")] == [
        "balanced:",
        "slow-trainer:",
        "slow-pool:",
        "heavy-tail:",
    ]
    assert run(*asked, "--scenario", "heavy-tail", "--plot", str(plot))[0] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    first, again = (json.loads(run(*asked, "--scenario", "slow-pool", "--json")[1]) for _ in range(2))
    assert first == again
    (only,) = first["scenarios"].values()
    assert [one["eta"] for one in only["outcomes"]] == [0, 2]
    assert only["shape"]["slots"] == 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scenario", "slow"), "--scenario='slow': all, or one of balanced,"),
        (("--etas", "a"), "--etas='a': bounds such as 0,1,4"),
        (("--on-stale", "keep"), "on_stale='keep'"),
        (("--slots", "0"), "slots=0: 1 to 1e+06"),
        (("--tail", "1000"), "tail=1000.0: 0 to 10"),
        (("--samples", "7"), "group=7: a divisor of batch_size=64"),
    ],
)
def test_simulate_refuses_by_name(arguments: tuple[str, ...], says: str) -> None:
    code, _, error = run("simulate", "staleness", "--training-steps", "5", *arguments)
    assert code == 2
    assert says in error
