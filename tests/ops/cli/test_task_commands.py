"""`rolloutmq embed`, and `score`, against a worker that answers from a script."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
from click.testing import Result
from support.pools.pool import worker
from typer.testing import CliRunner

from rolloutmq.ops.cli.main import app
from rolloutmq.worker.scripted.engine import ScriptedEngine, scripted_logprob


class Pooling(ScriptedEngine):
    """Embeds and rewards: (length, sum, version) of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks = frozenset({"task:embed", "task:reward"})


async def command(*words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, list(words))


async def test_embed_writes_an_array_and_reward_a_line_each(redis_db: str, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.npy"
    source.write_text('{"token_ids": [1, 2]}\n\n[3, 4, 5]\n')
    async with worker(redis_db, engine=Pooling()):
        done = await command("embed", str(source), "--out", str(out), "--redis", redis_db, "--timeout", "20")
        assert done.exit_code == 0, done.output
        scored = await command("score", "--file", str(source), "--redis", redis_db, "--timeout", "20")
    assert "2 embeddings of 3 components" in done.stdout
    np.testing.assert_array_equal(np.load(out), np.array([[2, 3, 0], [3, 12, 0]], np.float32))
    lines = [json.loads(line) for line in scored.stdout.splitlines()]
    assert lines == [
        {"line": 1, "score": 2.0, "scores": [2.0, 3.0, 0.0], "version": 0},
        {"line": 3, "score": 3.0, "scores": [3.0, 12.0, 0.0], "version": 0},
    ]


async def test_score_compares_continuations(redis_db: str) -> None:
    async with worker(redis_db):
        options = ("--redis", redis_db, "--timeout", "20", "--ids", "--tokens")
        done = await command("score", "--prompt", "1 2 3", *options, "10 11", "12")
        as_list = await command("score", "--prompt", "1 2 3", *options, "10 11", "12", "--json")
    assert done.exit_code == 0, done.output
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert json.loads(as_list.stdout) == [first, second]
    assert first["continuation"] == "10 11"
    assert np.allclose(first["logprobs"], [scripted_logprob(10), scripted_logprob(11)])
    assert np.isclose(first["logprob"], 2 * first["per_token"])
    assert np.isclose(second["logprob"], scripted_logprob(12))


async def test_what_is_wrong_is_said_without_a_traceback(redis_db: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('"a"\n[1]\n')
    out = ("--out", str(tmp_path / "out.npy"), "--redis", redis_db)
    for words, text in (
        (("embed", str(source), *out), "all texts"),
        (("embed", str(source), "--out", "x.txt", "--redis", redis_db), ".npy"),
        (
            ("embed", str(source), "--out", str(tmp_path / "no" / "x.npy"), "--redis", redis_db),
            "a folder that there is",
        ),
        (("score", "--prompt", "a b", "--ids", "1", "--redis", redis_db), "token ids"),
    ):
        failed = await command(*words)
        assert failed.exit_code == 2
        assert text in failed.stderr
    source.write_text("{}\n")
    failed = await command("embed", str(source), *out)
    assert "line 1" in failed.stderr
