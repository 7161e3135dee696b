"""A password of Redis is in no error, no output and no text of an object that holds it."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from rolloutmq import RolloutClient
from rolloutmq.messages import connect
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.operations.catalog import Context
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.verl.settings import PoolSettings
from rolloutmq.worker.config import WorkerConfig

SECRET = "HIDDENHIDDEN"
COMMANDS = (
    ["status"], ["doctor"], ["weights"], ["dead"], ["replies"], ["cancel", "x"], ["control", "version"], ["job", "x"],
    ["generate", "Hello"], ["scale", "--explain"],
)  # fmt: skip


@pytest.fixture
def urls(shared_redis: EmbeddedRedis) -> list[str]:
    """A login that is refused, and URLs that cannot be read."""
    port = shared_redis.port
    return [
        f"redis://user:{SECRET}@127.0.0.1:{port}/0",
        f"redis://user:{SECRET}/x@127.0.0.1:{port}/0",
        f"redis://:{SECRET}@[::1/0",
        f"redis://127.0.0.1:{port}/0?password={SECRET}&unknown=1",
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_no_command_shows_it(command: list[str], urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for url in urls:
        told = CliRunner().invoke(app, command, env={"ROLLOUTMQ_REDIS": url})
        assert told.exit_code != 0
        assert told.output
        assert SECRET not in told.output + str(told.exception) + caplog.text, url


async def test_no_object_shows_it(urls: list[str]) -> None:
    url = urls[0]
    redis: Redis = connect(url)
    operation = {one.name: None for one in fields(Context) if one.init and not one.name.startswith("_")}
    held = (
        redis, redis.connection_pool, redis.connection_pool.make_connection(), RolloutClient(url),
        WorkerConfig(redis_url=url), PoolSettings(redis_url=url), Context(**{**operation, "redis_url": url}),
    )  # fmt: skip
    for one in held:
        assert SECRET not in repr(one) + str(one), type(one)
