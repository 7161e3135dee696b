"""Publishes finished samples in batches: whatever is ready when the last batch is through goes with the next."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import Finished, Lease
from ...messages.redis import shard_of
from .batches import batches, each

log = logging.getLogger(__name__)
RETRY_S = 0.2


class Lane:
    """What waits to be published in one shard of the pool."""

    def __init__(self) -> None:
        self.ready: deque[Finished] = deque()
        self.more = asyncio.Event()

    def batch(self) -> list[Finished]:
        return next(batches(self.ready, lambda finished: len(finished.payload)), [])

    def take_out(self, finished: Finished) -> None:
        # clear() may have come between; then it is not at the head any more.
        if self.ready and self.ready[0] is finished:
            self.ready.popleft()


class Outbox:
    """Keeps finished samples until Redis has them or they are fenced. A shard that is away holds up no other.

    on_published(finished, state): called once per sample with "ok", "again" or "fenced". on_failed(finished, error):
    called instead for a sample that Redis cannot take because of what it has of its job or client.
    """

    def __init__(
        self,
        on_published: Callable[[Finished, str], None],
        on_failed: Callable[[Finished, Exception], None],
        shards: int = 1,
    ) -> None:
        self._on_published, self._on_failed = on_published, on_failed
        self._lanes = [Lane() for _ in range(shards)]
        self._making: dict[asyncio.Task[Finished | None], str] = {}
        self._published = asyncio.Event()

    def put(self, finished: Finished) -> None:
        lane = self._lanes[shard_of(finished.job_id, len(self._lanes)) if len(self._lanes) > 1 else 0]
        lane.ready.append(finished)
        lane.more.set()

    def put_later(self, job_id: str, making: Coroutine[Any, Any, Finished | None]) -> None:
        """Put what `making` returns, if anything. Until then the job counts as one that has a sample here."""
        task = asyncio.create_task(making)
        self._making[task] = job_id
        task.add_done_callback(self._made)

    def _made(self, task: asyncio.Task[Finished | None]) -> None:
        if self._making.pop(task, None) is None or task.cancelled():
            return  # cleared
        if (error := task.exception()) is not None:
            log.error("a result could not be made", exc_info=error)
        elif (finished := task.result()) is not None:
            self.put(finished)
        self._published.set()

    def jobs(self) -> set[str]:
        """Ids of the jobs that have a sample waiting here."""
        return {finished.job_id for lane in self._lanes for finished in lane.ready} | set(self._making.values())

    def clear(self, lease: Lease) -> None:
        """Forget what waits to be published under this lease, because it is lost."""
        for part in lease.parts:
            self._lanes[part.keys.shard].ready.clear()
        for task in [task for task, job_id in self._making.items() if lease.has(job_id)]:
            task.cancel()
            del self._making[task]
        self._published.set()

    async def flushed(self, job_id: str | None = None) -> None:
        """Return once nothing of this job, or nothing at all, waits here, with no other task run in between."""
        while waiting := self.jobs():
            if job_id not in (None, *waiting):
                return
            self._published.clear()
            await self._published.wait()

    async def run(self, lease: Lease) -> None:
        """Publish until cancelled. A Redis that does not answer is asked again; nothing is dropped meanwhile."""
        async with asyncio.TaskGroup() as tasks:
            for lane, part in zip(self._lanes, lease.parts, strict=True):
                tasks.create_task(self._publish(lane, part))

    async def _publish(self, lane: Lane, lease: Lease) -> None:
        while True:
            await lane.more.wait()
            batch = lane.batch()
            if not batch:
                lane.more.clear()
                continue
            try:
                await each(batch, partial(self._send, lane, lease), partial(self._give_up, lane))
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)
            self._published.set()

    async def _send(self, lane: Lane, lease: Lease, batch: list[Finished]) -> None:
        for finished, state in zip(batch, await lease.complete(batch), strict=True):
            lane.take_out(finished)
            self._on_published(finished, state)

    def _give_up(self, lane: Lane, finished: Finished, error: Exception) -> None:
        lane.take_out(finished)
        self._on_failed(finished, error)
