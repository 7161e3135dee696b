"""A pool's Redis for one command: connected to, asked, and let go of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from ...messages.broker import Broker
from ...messages.redis import Keys, PoolRedis, connect, ping

T = TypeVar("T")


@asynccontextmanager
async def connected(redis_url: str, pool: str) -> AsyncIterator[PoolRedis]:
    """A Redis that answers. Raises InvalidField, ConfigError or RedisUnavailable."""
    Keys(pool)  # a name that cannot be one is told before anything is connected to
    redis = connect(redis_url, pool=pool)
    try:
        await ping(redis)
        yield redis
    finally:
        await redis.aclose()


def ask(redis_url: str, pool: str, question: Callable[[Broker], Awaitable[T]]) -> T:
    """What `question` finds out from the pool's broker, for callers without an event loop."""

    async def run() -> T:
        async with connected(redis_url, pool) as redis:
            return await question(Broker(redis, pool))

    return asyncio.run(run())
