"""Listens for new pieces of the jobs that a client streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import Broker

log = logging.getLogger(__name__)
BLOCK_MS = 1000
RETRY_S = 0.2


class News:
    """Reads the client's news while it streams something. changed(): called when something was heard.

    News expires, and a failover may lose some. So all streamed jobs count as new when something may have been missed,
    and when nothing was heard for a second.
    """

    def __init__(self, broker: Broker, blocking: Redis, client_id: str, changed: Callable[[], None]) -> None:
        self._broker, self._blocking, self._client_id, self._changed = broker, blocking, client_id, changed
        self._followed: dict[str, bool] = {}  # job -> whether there is something new of it
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def follow(self, job_id: str) -> Iterator[None]:
        """Listen for news of this job while the block lasts. The job counts as new at first."""
        self._followed[job_id] = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read())
        try:
            yield
        finally:
            self._followed.pop(job_id, None)

    def fresh(self, job_id: str) -> bool:
        """Whether there may be new pieces of a job that is followed."""
        return self._followed[job_id]

    def looked(self, job_id: str) -> None:
        """Say that the job's pieces are about to be read."""
        self._followed[job_id] = False

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        place = "0"
        while self._followed:
            try:
                news = await self._broker.read_news(self._client_id, place, block_ms=BLOCK_MS, redis=self._blocking)
            except (RedisError, OSError) as error:
                log.warning("news of what is streamed cannot be read: %s", error)
                await asyncio.sleep(RETRY_S)
                place, heard = "0", set(self._followed)  # this may be another server after a failover
            else:
                place = news.place
                heard = set(self._followed) if news.more or not news.jobs else self._followed.keys() & news.jobs
            for job_id in heard:
                self._followed[job_id] = True
            if heard:
                self._changed()
