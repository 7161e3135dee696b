"""Listens for new pieces of the jobs that a client streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import Broker

log = logging.getLogger(__name__)
BLOCK_MS = 1000
RETRY_S = 0.2


class News:
    """Reads the client's news while it streams something. changed(jobs): called with those that something was heard of.

    News expires, and a failover may lose some. So all streamed jobs count as new when something may have been missed,
    and when nothing was heard for a second.
    """

    def __init__(
        self, shards: Sequence[tuple[Broker, Redis]], client_id: str, changed: Callable[[Iterable[str]], None]
    ) -> None:
        self._shards, self._client_id, self._changed = shards, client_id, changed
        self._followed: dict[str, bool] = {}  # job -> whether there is something new of it
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by shard

    @contextlib.contextmanager
    def follow(self, job_id: str) -> Iterator[None]:
        """Listen for news of this job while the block lasts. The job counts as new at first."""
        self._followed[job_id] = True
        shard, (part, blocking) = next(it for it in enumerate(self._shards) if it[1][0].has(job_id))
        if (task := self._tasks.get(shard)) is None or task.done():
            self._tasks[shard] = asyncio.create_task(self._read(part, blocking))
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
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _read(self, broker: Broker, blocking: Redis) -> None:
        place = "0"
        while followed := {job_id for job_id in self._followed if broker.has(job_id)}:
            try:
                news = await broker.read_news(self._client_id, place, block_ms=BLOCK_MS, redis=blocking)
            except (RedisError, OSError) as error:
                log.warning("news of what is streamed cannot be read: %s", error)
                await asyncio.sleep(RETRY_S)
                place, heard = "0", followed  # this may be another server after a failover
            else:
                place = news.place
                heard = followed if news.more or not news.jobs else followed & news.jobs
            for job_id in heard & self._followed.keys():
                self._followed[job_id] = True
            self._changed(heard)
