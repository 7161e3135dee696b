"""How a worker leaves: it finishes what fits into its budget and hands back the rest."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from redis.exceptions import RedisError

from ..messages.broker import Claim, Lease
from .engine import Engine
from .generation import Generation
from .jobs import HeldJobs
from .lease import Handback, Outbox

log = logging.getLogger(__name__)
LEAVE_S = 2.0
"""Of the drain budget this much is kept for handing back what did not finish. No drain has less."""
PREEMPTED_S = 4.0
"""The drain budget of a worker whose machine will be taken away."""
LOOK_S = 0.2
"""Seconds between two looks at a time that may have come nearer."""


class LeaveBy:
    """When a worker must have left, on time.monotonic. Each call of `within` can only bring it nearer."""

    def __init__(self) -> None:
        self.at = math.inf
        self._limit: tuple[asyncio.Timeout, float] | None = None

    def within(self, seconds: float) -> None:
        """Leave within so many seconds from now, or LEAVE_S if that is more. A limit under way is shortened, too."""
        self.at = min(self.at, time.monotonic() + max(LEAVE_S, seconds))
        if self._limit is not None:
            limit, share = self._limit
            with suppress(RuntimeError):  # it is over
                limit.reschedule(min(limit.when() or math.inf, self._loop_time(share)))

    def left(self, keep_s: float = 0.0) -> float:
        """Seconds until then, or until `keep_s` before."""
        return max(0.0, self.at - keep_s - time.monotonic())

    def limit(self, share: float = 1.0) -> asyncio.Timeout:
        """A timeout for `share` of the time that is left, for an `async with` block. There is one at a time."""
        limit = asyncio.timeout_at(self._loop_time(share))
        self._limit = limit, share
        return limit

    def _loop_time(self, share: float) -> float:
        return asyncio.get_running_loop().time() + self.left() * share


class Leaving:
    """Lets one worker leave its pool. by: when it must have left."""

    def __init__(
        self, engine: Engine, generation: Generation, held: HeldJobs, outbox: Outbox, handback: Handback
    ) -> None:
        self.by = LeaveBy()
        self._engine, self._generation = engine, generation
        self._held, self._outbox, self._handback = held, outbox, handback

    async def leave(self, lease: Lease, slow: list[Claim], lift: Callable[[], Awaitable[None]]) -> None:
        """Finish what fits, hand back the rest with its partials, unregister. Returns in time, whatever answers late.

        slow: jobs that were claimed and not admitted. lift(): makes sure that what runs can end.
        """
        in_flight, by = self._generation.in_flight, self.by
        self._generation.gate.holder("drain").acquire()
        with suppress(TimeoutError):
            async with by.limit(1 / 2):
                await lift()
        log.info("draining: %d samples run, %d jobs are held", self._generation.running, len(self._held))
        busy = self._outbox.jobs()
        waiting = [held for held in self._held if not any(sample.leg for sample in held.samples.values())]
        try:
            async with by.limit():
                await self._handback.release_claims(lease, slow)
                await self._handback.release(lease, [held for held in waiting if held.id not in busy])
            while not await in_flight.idle(min(LOOK_S, by.left(LEAVE_S))):
                if by.left(LEAVE_S) == 0:
                    await self._interrupt()
                    break
            with suppress(TimeoutError):
                async with by.limit(1 / 2):
                    await self._outbox.flushed()
                    await self._handback.settled()
            async with by.limit():
                # An engine that does not let go says in its progress what it has.
                await self._handback.release(lease, list(self._held), progress=self._engine.progress)
                if still := await lease.leave():
                    log.warning("%d jobs stay here until the lease runs out", still)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("left without a word, the lease will run out: %s", str(error) or "out of time")

    async def _interrupt(self) -> None:
        try:
            async with self.by.limit(1 / 2):
                await self._generation.in_flight.interrupt(self.by.left() / 2)
        except Exception as error:  # whatever it is, what the engine has is handed back
            log.warning("what runs could not be interrupted: %s", str(error) or "out of time")
