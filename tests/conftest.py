"""Redis for tests is always a real redis-server, started for them and gone after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from rolloutmq.ops.redis.embedded import EmbeddedRedis

pytest_plugins = ["support.pools.fixtures", "support.engines.fixtures"]


@pytest.fixture
def redis_server() -> Iterator[EmbeddedRedis]:
    """A server of the test's own, to kill, freeze or restart."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    return redis_server.url


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[EmbeddedRedis]:
    """One server for the many tests that only read and write; use `redis_db`, which empties it first."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_db(shared_redis: EmbeddedRedis) -> str:
    """URL of the shared server, emptied: data and cached scripts."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
        client.script_flush()
    return shared_redis.url
