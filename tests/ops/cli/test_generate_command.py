"""`rolloutmq generate`, run as a function in a pool with a scripted engine that says the prompt again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.pools.pool import worker
from support.specimens.byte_tokenizer import Bytes
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import app
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def run(url: str, *arguments: str, stdin: str = "", **engine: Any) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command beside a worker."""
    async with worker(url, tokenizer=Bytes(), engine=ScriptedEngine(echo=True, **engine)):
        command = ["generate", *arguments, "--redis", url, "--timeout", "10"]
        result = await asyncio.to_thread(CliRunner().invoke, app, command, stdin)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("hello", "--max-new-tokens", "5"), "hello\n"),
        (("größer", "--max-new-tokens", "8", "--stream"), "größer\n"),
        (("--token-ids", "5,6,7", "--max-new-tokens", "4"), "5 6 7 5\n"),
        (("--token-ids", "5,6,7", "--max-new-tokens", "4", "--stream"), "5 6 7 5\n"),
        (("hello", "--max-new-tokens", "2", "--n", "2"), "[0] he\n[1] he\n"),
        (("hi", "--chat", "--max-new-tokens", "8"), "user\nhi\n"),
        (("hi", "--system", "S", "--max-new-tokens", "8", "--n", "2"), "[0] system\n\n[1] system\n\n"),
        (("a\x1b[2Jb", "--max-new-tokens", "6"), "a\ufffd[2Jb\n"),
    ],
)
async def test_what_it_prints(redis_db: str, arguments: Sequence[str], said: str) -> None:
    code, out, error = await run(redis_db, *arguments)
    assert (code, error) == (0, "")
    assert out == said


async def test_what_it_prints_as_json(redis_db: str) -> None:
    async def told(*arguments: str) -> list[Any]:
        _, out, _ = await run(redis_db, "--token-ids", "5,6,7", "--max-new-tokens", "4", *arguments, "--json")
        return [json.loads(line) for line in out.splitlines()]

    (whole,) = await told()
    assert (whole["token_ids"], whole["finish_reason"], whole["versions"]) == ([5, 6, 7, 5], "length", [0])
    assert [one["sample"] for one in await told("--n", "2")] == [0, 1]
    assert [token for delta in await told("--stream") for token in delta["token_ids"]] == [5, 6, 7, 5]


@pytest.mark.parametrize("stream", [(), ("--stream",)])
async def test_every_line_is_a_turn(redis_db: str, stream: tuple[str, ...]) -> None:
    code, out, error = await run(
        redis_db, "ab", "--session", "--max-new-tokens", "6", *stream, stdin="cd\n\nef\n", tokens_per_s=100.0
    )
    assert (code, error) == (0, "")
    assert out == "ababab\nababab\nababab\n", "each turn's prompt begins with the first one"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a text, or --token-ids"),
        (("a", "--token-ids", "1"), "give a text, or --token-ids"),
        (("--token-ids", "99999999999"), "--token-ids='99999999999': token ids"),
        (("--token-ids", "1,x"), "--token-ids='1,x': token ids"),
        (("a", "--n", "2", "--stream"), "only 1"),
        (("a", "--temperature", "-1"), "temperature"),
        (("a", "--lora", "none"), "lora"),
    ],
)
async def test_what_is_wrong_is_said_in_a_line(redis_db: str, arguments: Sequence[str], says: str) -> None:
    code, _, error = await run(redis_db, *arguments)
    assert code == 2
    assert says in error
    assert "Traceback" not in error
