"""Cancels jobs of which nothing is wanted any more, also if Redis is away meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import Broker
from ...messages.redis import insist

log = logging.getLogger(__name__)
GAVE_UP = "its caller gave up"


class Dropped:
    """Jobs that the inbox has abandoned."""

    def __init__(
        self, broker: Broker, over: Callable[[], bool], start: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        """over(): whether the client is closed. start: runs a coroutine beside the calls."""
        self._broker, self._over, self._start = broker, over, start
        self._left: list[str] = []

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """As Broker.cancel. If Redis is away: returns [], and cancels them when it is back, or never if `over()`."""
        try:
            return await self._broker.cancel(job_ids, GAVE_UP)
        except (RedisError, OSError) as error:
            log.warning("%d jobs that nobody waits for were not cancelled yet: %s", len(job_ids), error)
        self._left += job_ids
        if len(self._left) == len(job_ids):  # else a task is at it
            self._start(self._cancel())
        return []

    async def _cancel(self) -> None:
        while job_ids := [*self._left]:
            with contextlib.suppress(RedisError, OSError):  # it was refused for good, or the client is closed
                await insist(partial(self._broker.cancel, job_ids, GAVE_UP), over=self._over)
            del self._left[: len(job_ids)]
