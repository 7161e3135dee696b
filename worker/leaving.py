"""How a worker leaves: it finishes what fits into its budget and hands back the rest."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from redis.exceptions import RedisError

from ..messages.broker import Claim, Lease
from .generation import Generation
from .jobs import HeldJobs
from .lease import Handback, Outbox

log = logging.getLogger(__name__)
LEAVE_S = 2.0
"""Of the drain budget this much is kept for handing back what did not finish. No drain has less."""


def left(deadline: float) -> float:
    """Seconds until `deadline`, which is on time.monotonic."""
    return max(0.0, deadline - time.monotonic())


class Leaving:
    """Lets one worker leave its pool."""

    def __init__(self, generation: Generation, held: HeldJobs, outbox: Outbox, handback: Handback) -> None:
        self._generation, self._held, self._outbox, self._handback = generation, held, outbox, handback

    async def leave(
        self, lease: Lease, deadline: float, slow: list[Claim], lift: Callable[[], Awaitable[None]]
    ) -> None:
        """Finish what fits, hand back the rest with its partials, unregister. Returns by `deadline` (time.monotonic).

        slow: jobs that were claimed and not admitted. lift(): makes sure that what runs can end.
        """
        in_flight = self._generation.in_flight
        self._generation.gate.holder("drain").acquire()
        with suppress(TimeoutError):
            async with asyncio.timeout(left(deadline) / 2):
                await lift()
        log.info("draining: %d samples run, %d jobs are held", self._generation.running, len(self._held))
        busy = self._outbox.jobs()
        waiting = [held for held in self._held if not any(sample.leg for sample in held.samples.values())]
        try:
            async with asyncio.timeout(left(deadline)):
                await self._handback.release_claims(lease, slow)
                await self._handback.release(lease, [held for held in waiting if held.id not in busy])
            if not await in_flight.idle(left(deadline - LEAVE_S)):
                await in_flight.interrupt(left(deadline) / 2)
            async with asyncio.timeout(left(deadline)):
                await self._outbox.flushed()
                await self._handback.settled()
                await self._handback.release(lease, list(self._held))
                if still := await lease.leave():
                    log.warning("%d jobs stay here until the lease runs out", still)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("left without a word, the lease will run out: %s", error or "out of time")
