"""Standstills, each made for real: the same cause is named by a waiting call, by status, doctor and the metric.

Each is made up to the moment at which Redis can show it. From then on every one of these has WITHIN_S.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, worker
from support.pools.standstills import LEASE_S, LONG, TABLE, Able, Make, Scene, paused, slow
from support.specimens.messages import job, tokens
from typer.testing import CliRunner

from rolloutmq import RolloutClient, WaitTimeout
from rolloutmq.messages.redis import shard_of
from rolloutmq.ops.cli import scale
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.doctor.redis_server import redis_findings
from rolloutmq.ops.metrics.exporter import Exporter
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.status import pool_state
from rolloutmq.producer.control import PoolControl
from rolloutmq.producer.diagnosis import CAUSES, read_pool, reasons, waits

pytestmark = pytest.mark.one_shard
WITHIN_S = 5.0


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits look soon, and know of no earlier reading."""
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    monkeypatch.setattr(waits, "FRESH_S", 0.2)
    monkeypatch.setattr(waits, "_pools", {})


async def redis_refuses(scene: Scene) -> None:
    await scene.worker(lease_s=0.5)
    await scene.submit(tokens(sampling=LONG))
    await scene.db.config_set("min-replicas-to-write", "1")
    scene.stack.push_async_callback(scene.db.config_set, "min-replicas-to-write", "0")

    async def nobody() -> bool:
        return not (await read_pool(scene.broker)).alive

    await eventually(nobody)


async def paused_beside_an_older_one(scene: Scene) -> None:
    """Only the one that is paused has what the job asks for."""
    await scene.worker(hold_version=0)
    await scene.commit(3)
    able = await scene.worker()
    able.generation.state.has(3)
    async with PoolControl(scene.url) as control:
        (await control.pause(worker_id=able.id)).check()
    await scene.submit(tokens(min_version=3))
    await scene.aside()


async def the_version_without_the_feature(scene: Scene) -> None:
    """One worker has the feature and is paused, the other one has only the version."""
    able = await scene.worker(Able("seed"))
    await scene.worker(Able())
    async with PoolControl(scene.url) as control:
        (await control.pause(worker_id=able.id)).check()
    await scene.submit(tokens(exact_version=0, seed=1))
    await scene.aside()


MADE: list[tuple[str, Make]] = [
    *TABLE,
    ("redis-refuses", redis_refuses),
    ("paused", paused_beside_an_older_one),
    ("paused", the_version_without_the_feature),
]


@asynccontextmanager
async def exporting(url: str) -> AsyncIterator[Exporter]:
    exporter = Exporter(url, "default", 0.2)
    task = asyncio.create_task(exporter.run())
    try:
        yield exporter
    finally:
        task.cancel()


async def named_everywhere(url: str, waiting: Any, cause: str) -> None:
    """Each of them names the cause first, in time."""

    async def by_the_wait() -> bool:
        with pytest.raises(WaitTimeout) as late:
            await waiting.result(0.3)
        return late.value.why.startswith(f"{cause}: ") and f"{cause}: " in str(late.value)

    async def by_status() -> bool:
        found = (await pool_state(url, "default"))["reasons"]
        return bool(found) and found[0]["cause"] == cause and found[0]["stops"]

    async def by_doctor() -> bool:
        found = [it for it in await redis_findings(url, "default") if it.name == "jobs"]
        return found[0].found.startswith(f"{cause}: ") and bool(found[0].advice)

    async with exporting(url) as exporter:

        def by_metric() -> bool:
            samples = [
                it for metric in exporter.collect() if metric.name.endswith("standstill") for it in metric.samples
            ]
            return cause in {it.labels["cause"] for it in samples if it.value == 1}

        shown: list[Callable[[], Any]] = [by_the_wait, by_status, by_doctor, by_metric]
        await asyncio.gather(*(eventually(each, WITHIN_S, each.__name__) for each in shown))


@pytest.mark.parametrize(("cause", "make"), MADE, ids=[make.__name__ for _, make in MADE])
async def test_a_standstill_is_named_everywhere(cause: str, make: Make, redis_db: str, db: Redis) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(RolloutClient(redis_db, client_id="client"))
        scene = Scene(redis_db, db, client, stack)
        await make(scene)
        await named_everywhere(redis_db, scene.waiting, cause)


async def test_a_shard_that_is_away_is_named_everywhere(redis_db: str, redis_server: EmbeddedRedis) -> None:
    url = f"{redis_db},{redis_server.url}"
    async with RolloutClient(url, client_id="client") as client, worker(url, engine=slow(), lease_s=LEASE_S):
        there = next(one for one in iter(lambda: job(sampling=LONG), None) if shard_of(one.id, 2) == 1)
        waiting = await client.submit(there.model_copy(update={"reply_to": "client"}))
        redis_server.kill()
        try:
            await named_everywhere(url, waiting, "shard-away")
        finally:
            redis_server.start()


def test_the_table_has_all_causes() -> None:
    assert {cause for cause, _ in MADE} | {"redis-away", "shard-away"} == set(CAUSES)


@pytest.mark.parametrize("command", [("status",), ("top", "--once"), ("scale", "--explain"), ("doctor",)], ids=" ".join)
async def test_commands_name_it(command: tuple[str, ...], redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "EXPLAIN_S", 0.1)
    async with RolloutClient(redis_db, client_id="client") as client:
        await client.submit(tokens())
        done = await asyncio.to_thread(CliRunner().invoke, app, [*command, "--redis", redis_db])
    assert "no-worker: the pool has no worker" in " ".join(done.output.split())
    if command == ("doctor",):
        assert done.exit_code == 1


async def test_a_pause_says_whose_it_is_and_since_when(redis_db: str, db: Redis) -> None:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(RolloutClient(redis_db, client_id="client"))
        scene, before = Scene(redis_db, db, client, stack), time.time()
        await paused(scene)
        (reason,) = reasons(await read_pool(scene.broker))
    assert f"is paused (pause interrupt by {getpass.getuser()}@{socket.gethostname()})" in reason.found
    assert reason.since is not None
    assert before - 1 <= reason.since <= time.time()
