"""The pool's clock, as this process has watched it."""

from __future__ import annotations

import time
from typing import Any

from redis.asyncio import Redis

from ..redis import Keys, text, whole

ROUND_TRIP_S = 0.2
"""Redis read the clock between question and answer. A longer round trip counts as this: nobody witnesses too much."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # the first goes on while a machine sleeps


class Witness:
    """Tells Redis how much time has passed since this process last heard of the pool's clock (see lib_base.lua).

    No wall clock has a say in it: neither this machine's nor, while somebody is there to watch, that of Redis' host.
    """

    def __init__(self) -> None:
        self._heard, self._at = 0, 0.0

    @staticmethod
    def now() -> float:
        """Seconds of a clock that nobody sets."""
        return time.clock_gettime(_CLOCK)

    def says(self) -> tuple[int | str, int]:
        """What the clock was, "" if this process has not heard of it, and the milliseconds since then."""
        return (self._heard, round((self.now() - self._at) * 1000)) if self._heard else ("", 0)

    def hears(self, clock: int, asked_at: float) -> None:
        """clock: an answer, in ms, to what was asked at `asked_at`, by `now`."""
        self._heard, self._at = clock, max(asked_at, self.now() - ROUND_TRIP_S)


async def living_workers(redis: Redis, keys: Keys) -> set[str]:
    """Workers whose lease has not run out, by the pool's clock."""
    client: Any = redis
    clock = whole(await client.hget(keys.clock, "at"))
    return {text(worker) for worker in await client.zrangebyscore(keys.workers, f"({clock}", "+inf")}
