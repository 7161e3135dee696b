"""`rolloutmq submit`: every line once, errors that name the line, and going on after anything."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.pools.commanded import hurry
from support.pools.pool import eventually, worker

from rolloutmq import RolloutClient, RolloutResult
from rolloutmq.messages import Broker, connect
from rolloutmq.messages.broker import Reply
from rolloutmq.messages.errors import ConfigError, InvalidField
from rolloutmq.ops import submit as module
from rolloutmq.ops.submit import Defaults, submit_file
from rolloutmq.worker.scripted.engine import ScriptedEngine

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry", "submit"]


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


async def run(url: str, source: Path, out: Path, *options: str, largest_file: int = -1) -> tuple[int, str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    process = await asyncio.create_subprocess_exec(
        *COMMAND, str(source), "--out", str(out), "--redis", url, *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        preexec_fn=limit if largest_file > 0 else None,
    )  # fmt: skip
    said, text = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, (said if "--json" in options else text).decode()


def begin(source: Path) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """The jobs of a file and the header that its first run writes."""
    jobs, digest = module.read_jobs(source, Defaults())
    assert digest == hashlib.sha256(source.read_bytes()).hexdigest()
    return jobs, {"input": digest} | asdict(Defaults())


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_bytes().splitlines()]


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


def test_files_that_do_not_belong_together_are_refused(redis_db: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"text": "a"}]), tmp_path / "out.jsonl"
    out.write_text("kept\n")
    with pytest.raises(ConfigError, match="--overwrite"):
        submit_file(source, out, redis_db, "default", Defaults())
    assert out.read_text() == "kept\n"
    out.unlink()
    (tmp_path / "out.jsonl.part").write_text(
        json.dumps({"asked": {"input": "other"}, "base": "0" * 24, "client": "c"}) + "\n"
    )
    with pytest.raises(ConfigError, match="was begun with input='other', not"):
        submit_file(source, out, redis_db, "default", Defaults())
    empty = write_lines(tmp_path / "empty.jsonl", ["", "  "])
    with pytest.raises(ConfigError, match="no line"):
        submit_file(empty, out, redis_db, "default", Defaults())


async def test_sampling_parameters_in_anybodys_words(redis_db: str, tmp_path: Path) -> None:
    words = {"max_tokens": 5, "n": 2, "top_k": 0, "logprobs": 0}
    source = write_lines(tmp_path / "in.jsonl", [{"token_ids": [1], "sampling": words}, {"token_ids": [2]}])
    async with worker(redis_db):
        code, _ = await run(redis_db, source, tmp_path / "out.jsonl", "--max-new-tokens", "3")
    assert code == 0
    answers = read(tmp_path / "out.jsonl")
    assert [(a["line"], a["sample"], len(a["token_ids"])) for a in answers] == [(1, 0, 5), (1, 1, 5), (2, 0, 3)]


async def test_lines_come_back_in_order_with_their_errors_in_place(redis_db: str, tmp_path: Path) -> None:
    lines = [{"token_ids": [1, 2, i]} for i in range(5)]
    lines[3] = {"token_ids": [1], "lora": "missing"}
    source, out = write_lines(tmp_path / "in.jsonl", ["", *lines]), tmp_path / "deep" / "out.jsonl"
    async with worker(redis_db):
        options = ("--n", "2", "--max-new-tokens", "3", "--logprobs")
        code, text = await run(redis_db, source, out, *options)
        again = await run(redis_db, source, out, *options, "--overwrite", "--json")
    assert (code, "1 of them with an error" in text) == (1, True)
    assert (again[0], json.loads(again[1])) == (1, {"out": str(out), "lines": 5, "open": 0, "failed": 1})
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
        generated = running.generation.finished
        hurry(running)
        code, text = await run(redis_db, source, out, *options)
        assert code == 0, text
        assert "going on:" in text
        assert generated < running.generation.finished <= 300  # nothing is generated a second time
    assert [(a["line"], a["sample"]) for a in read(out)] == [(i + 1, k) for i in range(200) for k in range(1 + i % 2)]


async def test_a_full_disk_loses_no_answer(redis_db: str, tmp_path: Path) -> None:
    source, out = (
        write_lines(tmp_path / "in.jsonl", [{"token_ids": [i + 1]} for i in range(40)]),
        tmp_path / "out.jsonl",
    )
    async with worker(redis_db, max_running=32) as running:
        code, text = await run(redis_db, source, out, "--max-new-tokens", "3", largest_file=3000)
        assert (code, "cannot be written" in text, "Traceback" in text) == (2, True, False)
        await eventually(lambda: running.generation.finished == 40)
        code, text = await run(redis_db, source, out, "--max-new-tokens", "3")
        assert code == 0, text
        assert running.generation.finished == 40  # none was generated again
    assert [a["line"] for a in read(out)] == list(range(1, 41))


async def test_a_disk_that_is_full_when_the_answers_are_sorted_loses_none(redis_db: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"token_ids": [1]}]), tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.sorted").symlink_to("/dev/full")
    async with worker(redis_db) as running:
        code, text = await run(redis_db, source, out, "--max-new-tokens", "3")
        assert (code, "Traceback" in text) == (2, False)
        assert "out.jsonl cannot be written: No space left on device. The answers are in" in text
        code, text = await run(redis_db, source, out, "--max-new-tokens", "3")
        assert (code, running.generation.finished) == (0, 1), text
    assert [answer["line"] for answer in read(out)] == [1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\n",
        b"{nope\n",
        b"[]\n",
        b"{}\n",
        b'{"base": 1, "client": 2}\n',
        b"9" * 5000 + b"\n",
        b"[" * 100_000 + b"\n",
    ],
    ids=["not UTF-8", "not JSON", "no object", "empty", "other types", "a long number", "deep"],
)
@pytest.mark.parametrize("begun", [False, True], ids=["first line", "later line"])
def test_garbage_beside_the_output_is_refused_and_kept(
    redis_db: str, tmp_path: Path, garbage: bytes, begun: bool
) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"token_ids": [1]}]), tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    if begun:
        module.Work(out, *begin(source)).close()
        garbage = part.read_bytes() + garbage
    part.write_bytes(garbage)
    with pytest.raises(ConfigError, match=r"out\.jsonl\.part is no file of submit; remove it"):
        submit_file(source, out, redis_db, "default", Defaults())
    assert part.read_bytes() == garbage


def test_going_on_with_other_defaults_is_refused(redis_db: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"token_ids": [1]}]), tmp_path / "out.jsonl"
    begun = module.Work(out, *begin(source))
    begun.close()
    kept = begun.part.read_bytes()
    for other, names in ((Defaults(n=2), "n=1, not 2;"), (Defaults(max_new_tokens=9), "max_new_tokens=128, not 9;")):
        with pytest.raises(ConfigError, match=names):
            submit_file(source, out, redis_db, "default", other)
    assert begun.part.read_bytes() == kept
    again = module.Work(out, *begin(source))
    assert again.base == begun.base
    again.close()


def test_a_second_run_at_the_same_time_is_refused(redis_db: str, tmp_path: Path) -> None:
    source, out = write_lines(tmp_path / "in.jsonl", [{"token_ids": [1]}]), tmp_path / "out.jsonl"
    first = module.Work(out, *begin(source))
    with pytest.raises(ConfigError, match="another submit is writing it"):
        submit_file(source, out, redis_db, "default", Defaults())
    first.close()
    assert len(read(first.part)) == 1


async def test_the_pool_drops_an_answer_only_when_it_is_on_the_disk(
    redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"token_ids": [i + 1]} for i in range(3)])
    work = module.Work(tmp_path / "out.jsonl", *begin(source))
    async with worker(redis_db), connect(redis_db) as db:
        stream = Broker(db, "default").keys.reply(work.client_id)
        client = await RolloutClient(redis_db, client_id=work.client_id, before_ack=work.sync).open()
        (reader,) = client._core.reader.streams
        assert work.sync(now=True)
        monkeypatch.setattr("rolloutmq.ops.records.SYNC_S", 1000.0)
        async for outcome in client.map(work.jobs(), timeout=10):
            assert isinstance(outcome, RolloutResult)
            assert work.take(outcome, logprobs=False)
        await reader._flush_acks()
        assert await db.xlen(stream) == 3  # written, but not synced yet
        monkeypatch.setattr("rolloutmq.ops.records.SYNC_S", 0.0)
        await reader._flush_acks()
        assert await db.xlen(stream) == 0

        def broken(_: int) -> None:
            raise OSError("no disk")

        forged = Reply("1-1", outcome, last=False)
        reader._acks.append(forged)
        monkeypatch.setattr(os, "fsync", broken)
        with pytest.raises(ConfigError, match="no disk"):
            await reader._flush_acks()
        monkeypatch.undo()
        await client.aclose()
        assert reader._acks == [forged]  # a sync that comes after a failed one proves nothing
    work.close()
