"""A server whose users are those of docs/redis.md."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import redis.asyncio
from support.redis.deployments import plain
from support.redis.roles import create

from rolloutmq.messages.redis import connect
from rolloutmq.ops.redis.embedded import EmbeddedRedis

Url = Callable[..., str]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started


@pytest.fixture
def url(server: EmbeddedRedis) -> Url:
    """Makes the URL of a role's user, on an empty server that has never refused anything."""
    with plain(server) as admin:
        admin.flushall()
        admin.execute_command("ACL", "LOG", "RESET")

    def make(role: str, pool: str = "mine", more: str = "") -> str:
        return create(server, role, pool, more)

    return make


@pytest.fixture
async def admin(server: EmbeddedRedis) -> AsyncIterator[redis.asyncio.Redis]:
    async with connect(server.url) as client:
        yield client
