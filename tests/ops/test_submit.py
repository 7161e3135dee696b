"""`rolloutmq submit`: every line once, errors that name the line, and going on after anything."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from pool import eventually, worker

from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops.submit import Defaults, submit_file
from rolloutmq.worker.scripted_engine import ScriptedEngine

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry", "submit"]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


async def run(url: str, source: Path, out: Path, *options: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, str(source), "--out", str(out), "--redis", url, *options, stderr=asyncio.subprocess.PIPE
    )
    _, text = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, text.decode()


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("{not json", "line 2"),
        ("[1, 2]", "line 2"),
        ({"text": "a", "colour": 1}, "line 2.colour"),
        ({"text": "a", "token_ids": [1]}, "exactly one of"),
        ({"n": 2}, "exactly one of"),
        ({"text": "a", "n": 0}, "line 2.n=0"),
        ({"text": "a", "sampling": {"top_p": 2}}, "line 2.sampling.top_p=2"),
        ({"text": "a", "sampling": 3}, "line 2.sampling"),
        ({"text": "a", "id": "0" * 32}, "line 2.id"),
        ({"token_ids": [1, -1]}, "not negative"),
    ],
)
def test_a_line_that_is_no_job_is_named_before_anything_is_submitted(tmp_path: Path, line: Any, names: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"text": "fine"}, line])
    with pytest.raises(InvalidField, match=names.replace(".", r"\.")):
        # Nothing listens at this address, and nothing is written: the file is refused first.
        submit_file(source, tmp_path / "out.jsonl", "redis://127.0.0.1:1/0", "default", Defaults())
    assert list(tmp_path.iterdir()) == [source]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out.jsonl"
    out.write_text("kept\n")
    with pytest.raises(ConfigError, match="--overwrite"):
        submit_file(source, out, "redis://127.0.0.1:1/0", "default", Defaults())
    assert out.read_text() == "kept\n"
    out.unlink()
    (tmp_path / "out.jsonl.part").write_text(json.dumps({"input": "other", "base": "0" * 24, "client": "c"}) + "\n")
    with pytest.raises(ConfigError, match="another input file"):
        submit_file(source, out, "redis://127.0.0.1:1/0", "default", Defaults())
    empty = write_lines(tmp_path / "empty.jsonl", ["", "  "])
    with pytest.raises(ConfigError, match="no line"):
        submit_file(empty, out, "redis://127.0.0.1:1/0", "default", Defaults())


async def test_lines_come_back_in_order_with_their_errors_in_place(redis_db: str, tmp_path: Path) -> None:
    lines = [{"token_ids": [1, 2, i]} for i in range(5)]
    lines[3] = {"token_ids": [1], "lora": "missing"}
    source, out = write_lines(tmp_path / "in.jsonl", ["", *lines]), tmp_path / "deep" / "out.jsonl"
    async with worker(redis_db):
        code, text = await run(redis_db, source, out, "--n", "2", "--max-new-tokens", "3", "--logprobs")
    assert (code, "1 of them with an error" in text) == (1, True)
    answers = read(out)
    # Line numbers are those of an editor: the empty first line counts.
    assert [(a["line"], a.get("sample")) for a in answers] == [
        (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, None), (6, 0), (6, 1),
    ]  # fmt: skip
    assert "lora" in answers[6]["error"]["detail"]
    assert all(len(a["logprobs"]) == len(a["token_ids"]) == 3 for a in answers if "sample" in a)
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
async def test_it_goes_on_after_it_was_stopped(redis_db: str, tmp_path: Path, end: signal.Signals) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"token_ids": [i + 1], "n": 1 + i % 2} for i in range(200)])
    out, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    options = ("--max-new-tokens", "20", "--window", "16")
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0), max_running=32) as running:
        first = asyncio.create_subprocess_exec(
            *COMMAND, str(source), "--out", str(out), "--redis", redis_db, *options, stderr=asyncio.subprocess.DEVNULL
        )
        process = await first
        await eventually(lambda: part.exists() and part.read_bytes().count(b"\n") > 30, 30)
        process.send_signal(end)
        assert await process.wait() == (130 if end == signal.SIGINT else -signal.SIGKILL)
        if end == signal.SIGKILL:
            part.write_bytes(part.read_bytes() + b'{"line": 1, "samp')  # the write that the kill cut off
        generated = running.worker._generation.finished
        code, text = await run(redis_db, source, out, *options)
        assert code == 0, text
        assert "going on:" in text
        assert generated < running.worker._generation.finished <= 300  # nothing is generated a second time
    assert [(a["line"], a["sample"]) for a in read(out)] == [(i + 1, k) for i in range(200) for k in range(1 + i % 2)]
