"""`rolloutmq cancel` and `rolloutmq replies`, for people and as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.pools.pool import eventually, worker
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker, connect
from rolloutmq.ops.cli.main import app
from rolloutmq.worker.scripted.engine import ScriptedEngine


def run(url: str, *arguments: str, answer: str = "") -> tuple[int, str]:
    shown = CliRunner().invoke(app, [*arguments, "--redis", url], input=answer)
    return shown.exit_code, shown.output


def told(url: str, *arguments: str) -> Any:
    """The one line of a command's stdout."""
    return json.loads(run(url, *arguments, "--json")[1])


async def queue(url: str, *jobs: Any) -> None:
    async with connect(url) as redis:
        await Broker(redis, "default").enqueue(jobs)


def test_cancel_by_id_group_and_client(redis_db: str) -> None:
    one, two, three, four, five = job(), job(group_id="g"), job(group_id="g"), job(), job()
    asyncio.run(queue(redis_db, one, two, three, four, five))
    assert run(redis_db, "cancel", one.id, "0" * 32) == (0, f"{one.id} cancelled\n{'0' * 32} was unknown\n")
    assert run(redis_db, "cancel", one.id) == (1, f"{one.id} was cancelled\n")
    assert told(redis_db, "cancel", five.id, "0" * 32) == {five.id: "cancelled", "0" * 32: "was unknown"}
    assert run(redis_db, "cancel", "--client", "client", "--group", "g") == (0, "cancelled 2 jobs\n")
    assert told(redis_db, "cancel", "--client", "client") == {"cancelled": 1}


async def test_partial_publishes_what_there_is(redis_db: str) -> None:
    long = job(n=1, sampling={"max_new_tokens": 1 << 16})
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=50.0)) as running:
        await queue(redis_db, long)
        await eventually(lambda: running.generation.running > 0)
        said = await asyncio.to_thread(told, redis_db, "cancel", long.id, "--partial")
    assert said == {long.id: "stopped"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give job ids"),
        (("--group", "g"), "give job ids"),
        (("a" * 32, "--client", "c"), "give job ids"),
        (("nonsense",), "job='nonsense': 32 lower-case hex"),
    ],
)
def test_cancel_says_what_is_missing(redis_db: str, arguments: tuple[str, ...], says: str) -> None:
    code, output = run(redis_db, "cancel", *arguments)
    assert code == 2
    assert says in output


def test_replies_list_and_drop(redis_db: str) -> None:
    assert run(redis_db, "replies", "list") == (0, "no results wait\n")
    one, two = job(), job()
    asyncio.run(queue(redis_db, one, two))
    run(redis_db, "cancel", one.id)
    code, output = run(redis_db, "replies", "list")
    assert code == 0
    assert "client  1 results" in output
    assert output.endswith("1 jobs open\n")
    (waiting,) = told(redis_db, "replies", "list")
    assert (waiting["client"], waiting["results"], waiting["open_jobs"]) == ("client", 1, 1)
    for wrong in (("replies", "drop"), ("replies", "list", "client")):
        assert "ConfigError: give the client with drop" in run(redis_db, *wrong)[1]
    assert run(redis_db, "replies", "drop", "client", answer="n\n")[0] == 1
    assert told(redis_db, "replies", "drop", "client", "--yes") == {"dropped": 1}
    assert run(redis_db, "replies", "list") == (0, "no results wait\n")
