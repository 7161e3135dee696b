"""A pool's Redis for one command: connect, ask, disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.exceptions import RedisError

from ...messages.broker import Broker, broker_of
from ...messages.errors import ConfigError, RedisUnavailable
from ...messages.redis import Keys, PoolRedis, connect, parse_shards, ping, redacted, told_as_ours, within

T = TypeVar("T")


@asynccontextmanager
async def connected(
    redis_url: str, pool: str, *, patient: bool = False, all_shards: bool = False, lenient: bool = False
) -> AsyncIterator[PoolRedis]:
    """A Redis that answers. Raises InvalidField, ConfigError or RedisUnavailable.

    patient: try for as long as any other command does; a command at a terminal tries once.
    all_shards: whether the caller looks at all shards of a pool with several. To others such a URL is a ConfigError.
    lenient: whether it only reads, and can do without shards that do not answer, except the home.
    """
    Keys(pool)  # a name that cannot be one is refused before anything is connected to
    if not all_shards and (count := parse_shards(redis_url).count) > 1:
        raise ConfigError(
            f"Redis URL {redacted(redis_url)!r}: this command looks at one shard, and the pool has {count}. Over all "
            "of them work: status, cancel, replies, job, submit, generate, worker, exporter, control, weights"
        )
    redis = connect(redis_url, pool=pool)
    try:
        try:
            await ping(redis, once=not patient)
        except RedisUnavailable:
            if not (lenient and redis.shards and await _answers(redis)):
                raise
        with told_as_ours(redis.where):  # pipelines raise redis-py's own errors, without the address
            yield redis
    finally:
        await redis.aclose()


async def _answers(home: Any) -> bool:
    try:
        with within(0.0):
            return bool(await home.ping())
    except (RedisError, OSError):
        return False


def ask(redis_url: str, pool: str, question: Callable[[Broker], Awaitable[T]]) -> T:
    """The answer of `question`, which is asked with the pool's broker. For callers without an event loop."""

    async def run() -> T:
        async with connected(redis_url, pool, all_shards=True) as redis:
            return await question(broker_of(redis, pool))

    return asyncio.run(run())


def reach(redis_url: str, pool: str) -> None:
    """Try Redis once, for a command that opens its own connections later. Raises as `connected` does."""

    async def nothing(_: Broker) -> None: ...

    ask(redis_url, pool, nothing)
