"""Two tenants of one pool, one of which takes the server for its own: what the other is answered, and how soon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.keys import bearer, keys_file
from support.pools import scripted_worker
from support.pools.served import gateway

from rolloutmq.worker.scripted.engine import scripted_logprob, scripted_token

log = logging.getLogger(__name__)
TOKENS_PER_S, ROOM = 100.0, 32
MOST = 16
"""Requests of the one that misbehaves that may run. Its operator has said so: a pool with free slots is no promise."""
FLOOD = 24
ASKERS = 8
PROMPT = [1, 2, 3]
LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100_000}}
FLUSHES = ("/flush_cache", "/reset_prefix_cache", "/pause?mode=keep&clear_cache=true", "/pause?mode=abort")
OTHERS = (
    ("/update_weights_from_disk", {"model_path": "/tmp", "abort_all_requests": True}),
    ("/update_weights", {"weight_dir": "/tmp"}),
    ("/begin_weight_update", {}),
    ("/init_weights_update_group", {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}),
    ("/finish_weight_update", {"weight_version": "9"}),
    ("/sleep", {"level": 2}),
)


@contextlib.contextmanager
def served(url: str, folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A worker and a gateway in processes of their own; the gateway's URL, and the keys of its tenants."""
    file, keys = keys_file(folder, {"other": "", "bad": f"max_running = {MOST}"})
    environment = scripted_worker.environment(url)
    command = scripted_worker.command(tokens_per_s=TOKENS_PER_S, max_running=ROOM)
    with (folder / "worker.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        with gateway(url, folder / "gateway.log", "--keys", str(file), "--log-level", "warning") as started:
            yield started.url, keys
    finally:
        process.kill()
        process.wait()


async def asked(client: httpx.AsyncClient, tokens: int) -> float:
    """Seconds until an answer, which has every token and logprob that it must have."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
    began = time.perf_counter()
    answer = await client.post("/generate", json=body)
    seconds = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    found = answer.json()
    info = found["meta_info"]
    expected = [scripted_token(f"{info['id']}0000", len(PROMPT) + at, 0) for at in range(tokens)]
    assert found["output_ids"] == expected
    assert [it[:2] for it in info["output_token_logprobs"]] == [
        [pytest.approx(scripted_logprob(it), abs=1e-6), it] for it in expected
    ]
    assert (info["finish_reason"]["type"], info["weight_version"], info["cached_tokens"]) == ("length", "0", 0)
    return seconds


async def block(client: httpx.AsyncClient, seconds: float, tokens: int) -> list[float]:
    """How long each answer took that was asked for in so many seconds."""
    ends, took = time.perf_counter() + seconds, list[float]()

    async def asker() -> None:
        while time.perf_counter() < ends:
            took.append(await asked(client, tokens))

    await asyncio.gather(*(asker() for _ in range(ASKERS)))
    return took


async def misbehaves(client: httpx.AsyncClient, seen: Counter[tuple[str, int]]) -> None:
    """All that a trainer may do to a server of its own, again and again. seen: route and status of each answer."""

    async def ask(path: str, body: dict[str, Any]) -> None:
        seen[path, (await client.post(path, json=body)).status_code] += 1

    flood = [asyncio.create_task(ask("/generate", LONG)) for _ in range(FLOOD)]
    try:
        while True:
            for path in FLUSHES:
                await ask(path, {})
            flood += [asyncio.create_task(ask("/generate", LONG)) for _ in range(FLOOD)]
            for path, body in OTHERS:
                await ask(path, body)
            await ask("/continue_generation", {})
            while flood:  # they begin when the pause is over
                await ask("/abort_request", {"abort_all": True})
                _, left = await asyncio.wait(flood, timeout=0.05)
                flood = [*left]
    finally:
        for one in flood:
            one.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


@contextlib.asynccontextmanager
async def misbehaving(client: httpx.AsyncClient, seen: Counter[tuple[str, int]]) -> AsyncIterator[None]:
    task = asyncio.create_task(misbehaves(client, seen))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()
        await client.post("/continue_generation")
        await client.post("/abort_request", json={"abort_all": True})


async def in_turns(url: str, folder: Path, rounds: int, seconds: float, tokens: int) -> list[float]:
    """How much longer the other's answers take beside one that misbehaves for so many seconds a round: medians' ratios.

    Each is between two blocks that follow each other, so a machine that gets busy does not count as a tenant.
    """
    ratios, quiet, loud = list[float](), list[float](), list[float]()
    seen: Counter[tuple[str, int]] = Counter()
    with served(url, folder) as (at, keys):
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=at, timeout=60, headers=bearer(keys["other"])) as other,
            httpx.AsyncClient(base_url=at, timeout=60, headers=bearer(keys["bad"]), limits=limits) as bad,
        ):
            await asked(other, tokens)  # a worker is there
            for _ in range(rounds):
                without = await block(other, seconds / 2, tokens)
                async with misbehaving(bad, seen):
                    beside = await block(other, seconds, tokens)
                ratios.append(statistics.median(beside) / statistics.median(without))
                quiet += without
                loud += beside
    statuses = {path: {code for to, code in seen if to == path} for path, _ in seen}
    assert statuses.pop("/generate") == {200, 429}
    assert all(statuses.pop(path) == {403} for path, _ in OTHERS), "weights are not its to bring"
    assert all(found == {200} for found in statuses.values()), statuses
    for name, took in (("without", quiet), ("beside", loud)):
        p95 = statistics.quantiles(took, n=20)[-1]
        log.info("%s: %d answers, median %.4f s, p95 %.4f s", name, len(took), statistics.median(took), p95)
    log.info("%d requests of the one that misbehaves; ratios %s", seen.total(), [round(it, 3) for it in ratios])
    return ratios


async def test_the_other_tenants_answers_are_right(redis_db: str, tmp_path: Path) -> None:
    await in_turns(redis_db, tmp_path, rounds=1, seconds=2.0, tokens=20)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
async def test_the_other_tenant_notices_nothing_in_five_minutes(redis_db: str, tmp_path: Path) -> None:
    """Answers of two seconds: of shorter ones the machine's own pauses are a larger part than what is looked for."""
    ratios = await in_turns(redis_db, tmp_path, rounds=15, seconds=20.0, tokens=200)
    assert statistics.median(ratios) <= 1.05, ratios
