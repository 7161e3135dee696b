"""The pool's bell: a short stream that announces changes, so nobody has to poll.

Apart from an operator's controls, and from `stop`, which is repeated until a worker hears it, state is never only on
the bell. A listener that missed another entry learns the same from the next heartbeat or from the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from .keys import Keys
from .raw import is_wrong_type, name_once, text

Ring = dict[str, str]
BLOCK_MS = 20_000
RETRY_S = 0.2
REPORTS_S = 0.005
"""Reports of a large pool come together. So long the next ones are collected, to be read at once."""


class Bell:
    """Listens from the moment of `open` on. A ring's `kind`: weights, cancel, stop, move, control or command."""

    def __init__(self, redis: Redis, pool: str, shard: int = 0, *, transfers: bool = False) -> None:
        """redis: a client for blocking reads. transfers: listen to the reports of transfers instead."""
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self._redis: Any = redis
        self._pause_s = REPORTS_S if transfers else 0.0
        keys = Keys(pool, shard)
        self._key = keys.transfers if transfers else keys.bell
        self._last = "0"
        self._rung = asyncio.Event()

    async def open(self) -> None:
        """Skip all earlier rings."""
        self._last = await self._newest()

    async def _newest(self) -> str:
        try:
            entries = await self._redis.xrevrange(self._key, count=1)
        except ResponseError as error:  # something else under its name: the next script that rings puts that aside
            if not is_wrong_type(error):
                raise
            name_once(f"{self._key}: {error}")
            return "0"
        return entries[0][0].decode() if entries else "0"

    async def listen(self, on_ring: Callable[[Ring], None] | None = None) -> None:
        """Call `on_ring` for each ring and wake every `wait`, until cancelled."""
        while True:
            try:
                answer = await self._redis.xread({self._key: self._last}, count=256, block=BLOCK_MS)
                if not answer and _order(await self._newest()) < _order(self._last):
                    self._last = "0"  # a stream that began again: nothing harms a listener that hears it twice
            except (RedisError, OSError) as error:
                if isinstance(error, ResponseError):
                    name_once(f"{self._key}: {error}")
                self._rung.set()  # a ring may have been missed, so everybody looks
                await asyncio.sleep(RETRY_S)
                continue
            if not answer:
                continue
            entries = answer[0][1]
            self._last = entries[-1][0].decode()
            for _, fields in entries:
                if on_ring is not None:
                    on_ring({text(name): text(value) for name, value in fields.items()})
            self._rung.set()
            if self._pause_s:
                await asyncio.sleep(self._pause_s)

    def quiet(self) -> None:
        """Forget all rings so far. Call it before you read the state that `wait` watches, so you miss no ring."""
        self._rung.clear()

    async def wait(self, deadline: float, glance_s: float) -> None:
        """Wait for the next ring since `quiet`, for `glance_s` seconds at most, and not past `deadline`.

        deadline: by time.monotonic().
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(glance_s, max(0.0, deadline - time.monotonic()))):
                await self._rung.wait()

    def ring_here(self) -> None:
        """Wake every `wait` in this process only."""
        self._rung.set()


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))
