"""`rolloutmq scale` and `rolloutmq up` as programs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from support.pools import scripted_worker
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually, wait_replies
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker, SamplingParams, connect
from rolloutmq.ops.cli import app


@asynccontextmanager
async def program(url: str, said: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command with scripted workers; what it prints goes to a file. It is gone afterwards, with its workers."""
    with said.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "support.pools.scaled_cli", *arguments, stdout=out, stderr=out,
            env={**os.environ, **scripted_worker.environment(url)}, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(60):
        return await process.wait()


async def test_scale_starts_workers_for_a_load_and_drains_them_when_it_is_stopped(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    arguments = ("scale", "--min", "0", "--max", "2", "--every", "0.1", "--logs", str(tmp_path / "logs"))
    async with program(redis_db, said, *arguments) as process:
        await eventually(lambda: broker.redis.exists(broker.keys.scaler), 60, "it has the lock")
        assert await broker.workers() == []
        jobs = [job(sampling=SamplingParams(max_new_tokens=4)) for _ in range(8)]
        await broker.enqueue(jobs)
        await wait_replies(broker, 8)
        assert len(await broker.workers()) >= 1
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0, said.read_text()
    assert await broker.workers() == []
    assert not await broker.redis.exists(broker.keys.scaler)
    assert "starved" in said.read_text()
    assert (tmp_path / "logs" / "worker-0.log").stat().st_size > 0


async def test_the_lock_of_a_scaler_that_looks_rarely_lasts_until_its_next_look(
    redis_db: str, broker: Broker, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    async with program(redis_db, said, "scale", "--every", "30") as process:
        await eventually(lambda: broker.redis.exists(broker.keys.scaler), 60, "it has the lock")
        assert await broker.redis.pttl(broker.keys.scaler) > 45_000
        process.send_signal(signal.SIGTERM)
        await ended(process)


async def serves(client: httpx.AsyncClient, openai: str) -> bool:
    try:
        return (await client.get(f"{openai.removesuffix('/v1')}/health")).status_code == 200
    except httpx.TransportError:
        return False


async def test_up_runs_a_whole_pool_until_ctrl_c(redis_db: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    arguments = ("up", "--workers", "2", "--port", "0", "--exporter-port", "0", "--gateway-port", "0")
    async with program(redis_db, said, *arguments) as process:
        await eventually(lambda: "ready: 2 serve" in said.read_text(), 60, "all serve")
        text = said.read_text()
        (url,) = re.findall(r"^redis +(\S+)$", text, re.MULTILINE)
        assert f"ROLLOUTMQ_REDIS={url}" in text
        metrics = re.search(r"^metrics +http://127\.0\.0\.1:\d+/metrics$", text, re.MULTILINE)
        assert metrics is not None, text
        (openai,) = re.findall(r"^openai +(\S+)$", text, re.MULTILINE)
        assert f'OpenAI(base_url="{openai}"' in text
        body = {"prompt": [1, 2], "max_tokens": 3, "return_token_ids": True}
        async with httpx.AsyncClient(timeout=60) as client:
            await eventually(lambda: serves(client, openai), 60, "the gateway serves")
            answer = await client.post(f"{openai}/completions", json=body)
            assert len(answer.json()["choices"][0]["token_ids"]) == 3
        async with connect(url) as redis:
            broker = Broker(redis, "default")
            await broker.enqueue([job()])
            await wait_replies(broker, 1)
        process.send_signal(signal.SIGINT)
        assert await ended(process) == 0, said.read_text()
    assert "Traceback" not in said.read_text()


@pytest.mark.slow
async def test_up_ends_when_its_redis_does(redis_db: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    async with program(
        redis_db, said, "up", "--workers", "1", "--port", "0", "--exporter-port", "0", "--gateway-port", "0"
    ) as process:
        await eventually(lambda: "ready: 1 serve" in said.read_text(), 60, "it serves")
        (server,) = [it for it in psutil.Process(process.pid).children(recursive=True) if "-server" in it.name()]
        server.kill()
        assert await ended(process) == 2, said.read_text()
    assert "the pool's Redis has ended" in said.read_text()
    assert "Traceback" not in said.read_text()


async def explained(url: str, *arguments: str) -> str:
    command = ["scale", "--explain", "--redis", url, *arguments]
    found = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert found.exit_code == 0, found.output
    return found.output


async def test_explain_says_what_a_pool_needs_and_why(
    redis_db: str, broker: Broker, joined: MakeLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.ops.cli.scale.EXPLAIN_S", 0.01)
    assert "idle: 0 workers wanted" in await explained(redis_db)
    await broker.enqueue([job(n=4, max_staleness=3) for _ in range(8)])
    text = await explained(redis_db)
    assert "starved: 1 workers wanted" in text
    assert "32 samples wait, and no worker serves." in text
    await joined("w1", running=8, max_running=8, tokens_per_s=10.0, generated_tokens=800, finished_samples=8)
    found = json.loads(await explained(redis_db, "--json", "--max", "3"))
    assert (found["state"], found["wanted"], found["need"]) == ("saturated", 3, 6)
    assert (found["pool"]["worker_tokens_per_s"], found["pool"]["eta"]) == (10.0, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--min", "3", "--max", "2"], "--min 3 is more than --max 2"),
        (["--max", "2", "--gpus", "0"], "max=2"),
        (["--max", "1", "--gpus", "0,0"], "gpus='0,0'"),
        (["--nonsense", "1", "--model", "."], "No such option: --nonsense"),
        (["--max", "2", "--model", ".", "--metrics-port", "9478"], "metrics_port=9478"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["--explain", "--model", "."], "--explain takes no flags of workers"),
        (["--json", "--model", "."], "--json is for --explain"),
        (["--target", "nan"], "--target"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(arguments: list[str], told: str) -> None:
    found = CliRunner().invoke(app, ["scale", "--redis", "redis://127.0.0.1:1/0", *arguments])
    assert found.exit_code == 2
    assert told in found.output.replace("\n", " ")
