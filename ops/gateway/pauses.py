"""Tenants that have paused: their new requests wait at every gateway of the pool; what runs, and others, go on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ...messages.redis import Keys, PoolRedis, text
from .requests import lenient

FRESH_S = 1.0
"""So old may be what is known of who has paused, where nobody had."""
LOOK_S = 0.1


class Pauses:
    """Which tenants of a pool have paused. It is in Redis; a gateway reads it once a second, while requests come."""

    def __init__(self, redis: PoolRedis, pool: str) -> None:
        self._redis: Any = redis
        self._key = Keys(pool).paused
        self._paused: frozenset[str] = frozenset()
        self._at = float("-inf")

    async def set(self, tenant: str, paused: bool) -> None:
        """From now on, here; at other gateways within a second. Raises RedisError."""
        if paused:
            await self._redis.hset(self._key, tenant, (await self._redis.time())[0])
        else:
            await self._redis.hdel(self._key, tenant)
        self._at = float("-inf")

    async def paused(self, tenant: str, max_age_s: float = 0.0) -> bool:
        """Whether the tenant has paused. Raises RedisError."""
        if time.monotonic() - self._at > max_age_s:
            self._paused = frozenset(text(one) for one in await lenient(self._redis.hgetall(self._key), {}))
            self._at = time.monotonic()
        return tenant in self._paused

    async def over(self, tenant: str) -> None:
        """Return when the tenant has not paused. Raises RedisError."""
        while True:
            if not await self.paused(tenant, LOOK_S):
                return
            await asyncio.sleep(LOOK_S)
