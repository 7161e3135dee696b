"""The lease of one incarnation of a worker: renewed every beat, and given up in time by the worker's own clock."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from ...messages.broker import Beat, Lease
from ...messages.errors import LeaseLost
from ...messages.model import WorkerStatus

log = logging.getLogger(__name__)
BEATS_PER_S = 300
"""Above so many heartbeats a second, of all workers together, each worker sends fewer."""
LONGEST_S = 2.0
"""But one in so many seconds, and four in a lease."""


class Membership:
    """Keeps a lease alive.

    Guarantee: no later than `lease_s` seconds of this process' monotonic clock after the last renewal that Redis can
    have seen was sent, `run` raises LeaseLost, whether Redis answers or not. By then nobody else holds the jobs yet,
    because Redis counts the same seconds from when the renewal arrived.
    """

    def __init__(self, lease: Lease, beat_s: float, max_lost: int) -> None:
        self.lease = lease
        self._beat_s, self._max_lost = beat_s, max_lost
        self.joined = False
        self._until = 0.0
        self._workers = 1

    async def join(self, status: WorkerStatus) -> Beat:
        """Register the worker."""
        sent = time.monotonic()
        beat = await self.lease.join(status)
        self._until, self.joined = sent + self.lease.lease_s, True
        return beat

    async def run(self, status: Callable[[], WorkerStatus], on_beat: Callable[[Beat], Awaitable[None]]) -> None:
        """Beat until cancelled. Raises LeaseLost."""
        while True:
            sent = time.monotonic()
            try:
                async with asyncio.timeout(self._until - sent):
                    beat = await self.lease.heartbeat(status())
                self._until, self._workers = sent + self.lease.lease_s, beat.workers
                async with asyncio.timeout(self._until - time.monotonic()):
                    await on_beat(beat)
                    if beat.reaps:
                        await self._reap()
            except LeaseLost:
                raise
            except Exception as error:  # whatever it is, the lease is over in time
                log.warning("no heartbeat: %s", str(error) or "Redis does not answer")
            now = time.monotonic()
            if now >= self._until:
                raise LeaseLost(f"no heartbeat got through for {self.lease.lease_s} s")
            await asyncio.sleep(min(max(0.0, sent + self._pause_s() - now), self._until - now))

    def _pause_s(self) -> float:
        """Seconds between heartbeats. Of a crowd they differ by chance: together they come at any moment, so that one
        of them always looks for dead workers."""
        crowd_s = min(self._workers / BEATS_PER_S, LONGEST_S, self.lease.lease_s / 4)
        return max(self._beat_s, crowd_s * random.uniform(0.5, 1.0))

    async def _reap(self) -> None:
        requeued, dead, expired, removed = await self.lease.reap(self._max_lost)
        if requeued or dead or expired or removed:
            log.info(
                "reaped %d workers: %d jobs requeued, %d dead-lettered, %d expired", removed, requeued, dead, expired
            )
