"""`rolloutmq top` in a real terminal, over a real server and scripted workers: keys, sizes, losses, and the way out."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from rich.cells import cell_len
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually, worker
from support.specimens.messages import job
from support.terminal import Terminal
from typer.testing import CliRunner

from rolloutmq.messages import Broker, Lease
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = 3600.0
"""Seconds of a lease that no test outlasts."""


@pytest.fixture
async def pool(redis_db: str, broker: Broker, joined: MakeLease) -> AsyncIterator[str]:
    """A scripted worker that never gets done with two jobs, a busy worker `another`, and a job for newer weights.

    Returns the first one's id.
    """
    await joined("another", LONG, version=0, host="node-1", running=3, max_running=64, tokens_per_s=1234.0)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=1.0), drain_s=0.0) as running:
        endless = {"max_new_tokens": 1000}
        await broker.enqueue([job(sampling=endless, reply_to="trainer-1", group_id="g-7", n=4) for _ in range(2)])

        async def holds_them() -> bool:
            return any(it.held == 8 for it in await broker.workers())

        await eventually(holds_them)
        await broker.enqueue([job(min_version=9, reply_to="trainer-2")])
        yield running.id


def top(url: str, *more: str, **size: int) -> Terminal:
    return Terminal("top", "--redis", url, "--every", "0.2", *more, **size)


async def test_the_pool_a_worker_and_a_job(redis_db: str, pool: str) -> None:
    async with top(redis_db, columns=120) as terminal:
        await terminal.shows("pool default", "2 workers", "weights 0", "3 jobs open", "2 running", "8/256", "1,234")
        assert "versions served 0: 2   imbalance 1.00" in terminal.text
        assert "3/64" in terminal.line("another")
        assert "node-1" in terminal.line("another")
        assert terminal.marked().startswith("(queue)")
        terminal.press("down", "down")
        await terminal.shows(lambda: terminal.marked().startswith(pool))
        terminal.press("enter")
        await terminal.shows(
            f"worker {pool}", "8 samples held", "scripted", "newest weights", lambda: "trainer-1" in terminal.marked()
        )
        (chosen, *_) = terminal.marked().split()
        assert "0/4" in terminal.marked()
        terminal.press("down")
        await terminal.shows(lambda: terminal.marked() and chosen not in terminal.marked())
        (chosen, *_) = terminal.marked().split()
        terminal.press("enter")
        await terminal.shows(f"job {chosen}", "running", "client: trainer-1", "group: g-7", "samples published: 0")
        assert f"worker: {pool}" in terminal.text
        terminal.press("escape")
        await terminal.shows(f"worker {pool}", lambda: terminal.marked().startswith(chosen))
        terminal.press("escape")
        await terminal.shows("2 workers", lambda: terminal.marked().startswith(pool))
        terminal.press("q")
        assert await terminal.ended() == 0
        await eventually(terminal.as_it_was)


async def test_the_queue_and_a_job_that_ends_meanwhile(redis_db: str, pool: str, broker: Broker) -> None:
    async with top(redis_db) as terminal:
        await terminal.shows("3 jobs open", "(queue)")
        terminal.press("enter")
        await terminal.shows("1 normal", lambda: "queued" in terminal.marked())
        (waiting, *_) = terminal.marked().split()
        terminal.press("enter")
        await terminal.shows("job " + waiting.rstrip("…"), "queued", "waits for weights version 9", "client: trainer-2")
        (job_id,) = await broker.open_jobs("trainer-2")
        await broker.cancel([job_id])
        await terminal.shows("cancelled", "Redis has no more of a job that has ended")


async def test_resized_it_fits_again(redis_db: str, pool: str) -> None:
    async with top(redis_db) as terminal:
        await terminal.shows("dead letters", "HOST", "enter open  q quit")
        terminal.resize(40, 10)
        await terminal.shows(
            "3 jobs open", "TOK/S", lambda: "HOST" not in terminal.text, lambda: "q quit" in bottom(terminal)
        )
        assert "another" in terminal.text
        terminal.press("down", "enter")
        await terminal.shows("worker another", "3/64 running", "STATE")
        terminal.resize(160, 50)
        await terminal.shows("GROUP", lambda: "q quit" in bottom(terminal))


def bottom(terminal: Terminal) -> str:
    return terminal.screen.display[-1]


async def test_200_workers(redis_db: str, broker: Broker, joined: MakeLease) -> None:
    await broker.redis.hset(broker.keys.weights, "committed", 1)
    for number in range(200):
        await joined(f"w{number:03}", LONG, version=number % 2)
    async with top(redis_db) as terminal:
        await terminal.shows(
            "200 workers",
            "versions served 1: 100, 0: 100",
            "w000",
            lambda: terminal.line("w000").split()[4:6] == ["0", "1"],
        )
        assert "w199" not in terminal.text
        terminal.press("end")
        await terminal.shows(lambda: terminal.marked().startswith("w199"))
        terminal.press("up", "up")
        await terminal.shows(lambda: terminal.marked().startswith("w197"), "w199")
        await broker.redis.zrem(broker.keys.workers, "w197")
        await terminal.shows("199 workers", lambda: "w197" not in terminal.text)


async def test_a_worker_that_is_silent_and_one_that_leaves(
    redis_db: str, broker: Broker, joined: MakeLease, expire_lease: Callable[[Lease], Awaitable[None]]
) -> None:
    silent, leaver = await joined("silent-one", LONG), await joined("leaver", LONG)
    async with top(redis_db) as terminal:
        await terminal.shows("2 workers")
        await expire_lease(silent)  # nobody is there who would take its jobs back and strike it off the list
        await terminal.shows("1 worker ", lambda: " silent " in terminal.line("silent-one"))
        terminal.press("down", "enter")
        await terminal.shows("worker leaver")
        await leaver.leave()
        await terminal.shows("gone")


async def test_a_redis_that_goes_away_and_comes_back(redis_server: EmbeddedRedis) -> None:
    async with worker(redis_server.url), top(redis_server.url) as terminal:
        await terminal.shows("1 worker ", "serving")
        redis_server.kill()
        await terminal.shows("no answer for", "trying again")
        assert "1 worker " in terminal.text  # what was seen last
        terminal.press("down", "enter")
        await terminal.shows("samples held")
        redis_server.restart()
        await terminal.shows("q quit", lambda: "no answer" not in terminal.text)


@pytest.mark.parametrize("way", ["\x03", "q", signal.SIGTERM])
async def test_the_terminal_is_as_it_was(way: str | signal.Signals, redis_db: str) -> None:
    async with top(redis_db) as terminal:
        await terminal.shows("nobody serves")
        assert not terminal.as_it_was()
        if isinstance(way, str):
            terminal.press(way)
        else:
            terminal.process.send_signal(way)
        assert await terminal.ended() == 0
        await eventually(terminal.as_it_was)


async def test_ctrl_c_while_redis_is_gone(redis_server: EmbeddedRedis) -> None:
    async with top(redis_server.url) as terminal:
        await terminal.shows("nobody serves")
        redis_server.kill()
        await terminal.shows("no answer")
        terminal.press("\x03")
        assert await terminal.ended() == 0
        await eventually(terminal.as_it_was)


async def test_without_a_redis_it_does_not_begin() -> None:
    async with top("redis://127.0.0.1:1/0") as terminal:
        assert await terminal.ended() == 2
        await eventually(lambda: "RedisUnavailable" in terminal.text)


async def test_for_scripts(redis_db: str, pool: str) -> None:
    async def run(*more: str) -> Any:
        return await asyncio.to_thread(CliRunner().invoke, app, ["top", "--redis", redis_db, "--every", "0.2", *more])

    as_json, plain = await run("--json"), await run("--once")
    state = json.loads(as_json.stdout)
    assert (state["open_jobs"], state["queued"]["normal"], state["committed_version"]) == (3, 1, 0)
    assert [it["worker_id"] for it in state["workers"]] == ["another", pool]
    assert state["tokens_per_s"] >= 1234.0
    assert (state["jobs_per_s"], state["seconds_of_work"]) == (0.0, None)
    assert "3 jobs open" in plain.stdout
    assert "\x1b" not in plain.stdout
    assert all(cell_len(line) <= 80 for line in plain.stdout.splitlines())
