"""`rolloutmq cancel` and `rolloutmq replies`."""

from __future__ import annotations

import asyncio

import pytest
from support.specimens.messages import job
from typer.testing import CliRunner

from rolloutmq.messages import Broker, connect
from rolloutmq.ops.cli.main import app


def run(url: str, *arguments: str, answer: str = "") -> tuple[int, str]:
    shown = CliRunner().invoke(app, [*arguments, "--redis", url], input=answer)
    return shown.exit_code, shown.output


def queue(url: str, *jobs: object) -> None:
    async def enqueue() -> None:
        async with connect(url) as redis:
            await Broker(redis, "default").enqueue(jobs)  # type: ignore[arg-type]

    asyncio.run(enqueue())


def test_cancel_by_id_group_and_client(redis_db: str) -> None:
    one, two, three, four = job(), job(group_id="g"), job(group_id="g"), job()
    queue(redis_db, one, two, three, four)
    assert run(redis_db, "cancel", one.id, "0" * 32) == (0, f"{one.id} cancelled\n{'0' * 32} was unknown\n")
    assert run(redis_db, "cancel", one.id) == (1, f"{one.id} was cancelled\n")
    assert run(redis_db, "cancel", "--client", "client", "--group", "g") == (0, "cancelled 2 jobs\n")
    assert run(redis_db, "cancel", "--client", "client") == (0, "cancelled 1 jobs\n")


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
    queue(redis_db, one, two)
    run(redis_db, "cancel", one.id)
    code, output = run(redis_db, "replies", "list")
    assert code == 0
    assert "client  1 results" in output
    assert output.endswith("1 jobs open\n")
    for wrong in (("replies", "drop"), ("replies", "list", "client")):
        assert "ConfigError: give the client with drop" in run(redis_db, *wrong)[1]
    assert run(redis_db, "replies", "drop", "client", answer="n\n")[0] == 1
    assert run(redis_db, "replies", "drop", "client", "--yes") == (0, "dropped 1 results\n")
    assert run(redis_db, "replies", "list") == (0, "no results wait\n")
