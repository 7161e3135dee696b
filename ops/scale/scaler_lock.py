"""One scaler for each pool: two would start and drain each other's workers."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from typing import Any

from redis.asyncio.lock import Lock
from redis.exceptions import LockError

from ...messages.errors import ConfigError
from ...messages.redis import Keys, PoolRedis, text

log = logging.getLogger(__name__)
LOCK_S = 15.0
"""Seconds after which another scaler may follow one that was killed."""


class ScalerLock:
    """A lock in the pool's Redis, with a time to live. It is no fence: it keeps operators from a mistake.

    lock_s: seconds for which it is kept without a word of its holder. patience_s: how long `take` waits for another
    scaler; by default longer than the lock of one that was killed.
    """

    def __init__(self, redis: PoolRedis, pool: str, lock_s: float = LOCK_S, patience_s: float | None = None) -> None:
        self._redis, self._key, self._lock_s = redis, Keys(pool).scaler, lock_s
        self._patience_s = lock_s * 1.2 if patience_s is None else patience_s
        self._name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lock = Lock(redis, self._key, timeout=lock_s, sleep=min(0.5, self._patience_s / 5), thread_local=False)

    async def take(self) -> None:
        """Wait for it. Raises ConfigError if another one has it all the time."""
        if holder := await self._holder():
            log.info(
                "scaler %s was at work here lately: waiting up to %g s for its lock to end", holder, self._patience_s
            )
        if not await self._lock.acquire(token=self._name, blocking_timeout=self._patience_s):
            raise ConfigError(await self._taken())

    async def keep(self) -> None:
        """Keep it for another while, or have it again if Redis has lost it. Raises ConfigError if another has it."""
        try:
            await self._lock.extend(self._lock_s, replace_ttl=True)
        except LockError:
            if not await self._lock.acquire(token=self._name, blocking=False):
                raise ConfigError(await self._taken()) from None

    async def release(self) -> None:
        """Let the next one have it at once."""
        await self._lock.release()

    async def _holder(self) -> str:
        redis: Any = self._redis
        return text(await redis.get(self._key))

    async def _taken(self) -> str:
        return f"scaler {await self._holder() or 'of another host'} scales this pool already: a pool has one"
