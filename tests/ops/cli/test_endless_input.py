"""Files of prompts and answers: a line without an end, lines without an end, and what is read while it is printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from rolloutmq.messages.codec import MAX_MESSAGE_BYTES
from rolloutmq.ops import files as file_module
from rolloutmq.ops.cli.main import app

READERS = {
    "submit": ("submit", "--out", "o"),
    "embed": ("embed", "--out", "o.npy"),
    "score": ("score", "--file"),
    "decode": ("decode", "--json", "--model", ".", "--file"),
}
ANSWER = '{"token_ids": [1]}\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, with a tokenizer, in which a line may have 1,000 bytes."""
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(file_module, "MOST_BYTES", 1000)
    monkeypatch.chdir(tmp_path)


def refused(command: str, file: str, said: str) -> None:
    ended = CliRunner().invoke(app, [*READERS[command], file], env={"ROLLOUTMQ_REDIS": "redis://127.0.0.1:1/0"})
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith("InvalidField: ")
    assert ended.stderr.endswith(f"{said}\n")


@pytest.mark.parametrize("command", READERS)
def test_a_line_without_end(command: str) -> None:
    refused(command, "/dev/zero", "'/dev/zero': line 1 must have at most 1,000 bytes")


@pytest.mark.parametrize("command", READERS)
def test_a_line_that_is_too_long_is_named_and_those_of_that_length_are_read(command: str) -> None:
    start = '{"token_ids": [1]'
    Path("l.jsonl").write_text(f"{start + '}':<999}\n\n{start:<1000}}}\n")
    refused(command, "l.jsonl", "'l.jsonl': line 3 must have at most 1,000 bytes")


@pytest.mark.parametrize(("lines", "nbytes"), [(3, 1000), (1000, 3 * len(ANSWER))])
@pytest.mark.parametrize("command", READERS)
def test_short_lines_without_end(command: str, lines: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe: who reads on after the limit waits for a line that does not come."""
    monkeypatch.setattr(file_module, "MOST_LINES", lines)
    monkeypatch.setattr(file_module, "MOST_INPUT_BYTES", nbytes)
    os.mkfifo("pipe")
    endless = os.open("pipe", os.O_RDWR)
    try:
        os.write(endless, ANSWER.encode() * 4)
        most = f"at most {lines:,} lines and {nbytes:,} bytes"
        refused(command, "pipe", f"'pipe': must have {most}; split it into several files")
    finally:
        os.close(endless)


def test_decode_keeps_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "MOST_LINES", 3)
    Path("answers.jsonl").write_text(ANSWER * 5)
    ended = CliRunner().invoke(app, ["decode", "--model", ".", "--file", "answers.jsonl"])
    assert (ended.exit_code, ended.stdout) == (0, '"b"\n' * 5)


def test_a_line_may_be_as_long_as_a_job_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert file_module.MOST_BYTES == 3 * MAX_MESSAGE_BYTES
