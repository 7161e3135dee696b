"""While a worker starts it is in no list of workers yet: this says in Redis that it comes, and how long that took."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..messages.redis import Keys, whole
from .gate import set_within

EVERY_S = 3.0
SILENT_MS = 60_000
"""One of which nothing was heard for so long is gone."""
REMEMBER_S = 86400


async def says_it_starts(redis: Redis, pool: str, joined: asyncio.Event) -> None:
    """Say it every few seconds until `joined` is set; then how long it took. Nobody depends on it."""
    client: Any = redis
    key, me, began = Keys(pool).starting, f"{socket.gethostname()}-{os.getpid()}", 0
    while not joined.is_set():
        with suppress(RedisError, OSError):
            now = await _now_ms(client)
            began = began or now
            known = await client.hgetall(key)
            gone = [it for it, said in known.items() if it and now - whole(said.split(b" ")[-1]) > SILENT_MS]
            await client.hset(key, me, f"{began} {now}")
            await client.expire(key, REMEMBER_S)
            if gone:
                await client.hdel(key, *gone)
        await set_within(joined, EVERY_S)
    with suppress(RedisError, OSError):
        await client.hset(key, "", await _now_ms(client) - began)
        await client.hdel(key, me)


async def _now_ms(client: Any) -> int:
    seconds, micros = await client.time()
    return int(seconds) * 1000 + int(micros) // 1000
