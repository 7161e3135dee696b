"""A short look at the pool for methods that are no coroutines but called from one: in a thread with its own loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...messages.broker import Broker
from ...messages.model import WorkerStatus
from ...messages.redis import connect

LOOK_S = 5.0


def look(redis_url: str, pool: str) -> list[WorkerStatus]:
    """The pool's workers. Blocks the caller, LOOK_S at most. Raises RedisUnavailable, TimeoutError."""

    async def ask() -> list[WorkerStatus]:
        async with asyncio.timeout(LOOK_S), connect(redis_url, pool=pool) as redis:
            return await Broker(redis, pool).workers()

    with ThreadPoolExecutor(1, "rolloutmq-look") as threads:
        return threads.submit(asyncio.run, ask()).result()
