"""Ends jobs at their deadline, and frees their slots in the engine at once."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import RedisError

from ...messages.broker import Lease
from ..jobs import HeldJob, HeldJobs

log = logging.getLogger(__name__)


class Deadlines:
    """Watches the deadlines of held jobs."""

    def __init__(self, held: HeldJobs) -> None:
        self._held = held
        self._next: float | None = None
        self._sooner = asyncio.Event()
        self._telling: set[asyncio.Task[None]] = set()

    def look(self, deadline: float | None) -> None:
        """Watch a new job's deadline, which is on the monotonic clock."""
        if deadline is not None and (self._next is None or deadline < self._next):
            self._next = deadline
            self._sooner.set()

    async def run(self, lease: Lease) -> None:
        """Run until cancelled. If Redis cannot be told, it ends such a job itself a second after the deadline."""
        while True:
            self._sooner.clear()
            due = [held.deadline for held in self._held if held.deadline is not None]
            self._next = min(due, default=None)
            try:
                async with asyncio.timeout(None if self._next is None else max(0.0, self._next - time.monotonic())):
                    await self._sooner.wait()
                continue
            except TimeoutError:
                pass
            now = time.monotonic()
            for held in [one for one in self._held if one.deadline is not None and one.deadline <= now]:
                self._held.drop(held.id)
                telling = asyncio.create_task(self._tell(lease, held))  # others may be late before Redis has answered
                self._telling.add(telling)
                telling.add_done_callback(self._telling.discard)

    async def _tell(self, lease: Lease, held: HeldJob) -> None:
        try:
            await lease.expire(held.id, held.claim.attempt)
        except (RedisError, OSError) as error:
            log.warning("job %s is past its deadline, and Redis could not be told: %s", held.id, error)
