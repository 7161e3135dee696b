"""Keeps an engine up: from its death to the moment it serves again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from redis.exceptions import RedisError

from ..messages.broker import Lease
from ..messages.errors import EngineError, LeaseLost
from .engine import Engine
from .generation import Generation
from .jobs import HeldJobs
from .lease import ClaimLoop, Handback, Outbox
from .slots import RETRIES_S

log = logging.getLogger(__name__)
LEAVE_S = 2.0
"""Seconds that requests may take to hear that their engine is gone."""


class EngineKeeper:
    """Keeps the engine of one worker up. most: restarts in a row without a finished sample, after which it gives up.

    restarts: how many there have been; in_a_row: how many
    since a sample was finished.
    """

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        held: HeldJobs,
        outbox: Outbox,
        *,
        handback: Handback,
        most: int,
    ) -> None:
        self.restarts = self.in_a_row = 0
        self._state = generation.state
        self._engine, self._generation, self._held = engine, generation, held
        self._outbox, self._handback, self._most = outbox, handback, most

    async def start(self, drained: asyncio.Event, *, empty: bool = False) -> None:
        """Start it the first time, which can take minutes; setting `drained` ends that. Raises EngineError.

        empty: see `Engine.start`.
        """
        starting = asyncio.create_task(self._engine.start(empty=True) if empty else self._engine.start())
        leaving = asyncio.create_task(drained.wait())
        try:
            await asyncio.wait({starting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        if not starting.cancelled():
            await starting
            log.info("engine is up: %s", self._engine.info)

    def it_works(self) -> None:
        """A sample was finished."""
        self.in_a_row = 0

    async def run(self, lease: Lease, claims: ClaimLoop, on_restarted: Callable[[], None]) -> None:
        """Restart a dead engine, until cancelled. Its jobs go back to the pool first: others need not wait for it.

        Raises LeaseLost if they could not be given back, EngineError if the engine cannot be kept up.
        """
        while True:
            await self._state.dead.wait()
            log.error("the engine died; restarting it")
            self.restarts += 1
            self.in_a_row += 1
            await self._engine.close()  # whatever still waits for it hears EngineDead now
            await self._generation.in_flight.idle(LEAVE_S)
            # A dead engine leaves no room: after this no job is admitted any more, and finished samples are published.
            await claims.settled()
            await self._outbox.flushed()
            await self._give_back(lease)
            if self.in_a_row > self._most:
                raise EngineError(f"the engine died {self.in_a_row} times without finishing a sample")
            # It may have died for want of memory, which nobody can tell: half as many samples need less.
            self._generation.slots.relieve()
            # Whoever has the turn now has heard that its engine is gone, and gives it up: what it does about the old
            # engine must not come after the new one is there.
            async with self._state.turn.take("a restart of the engine"):
                await self._start_again()
                if self._state.restarted():
                    log.warning("the engine was restarted: it is neither frozen nor asleep any more")
                on_restarted()

    async def _give_back(self, lease: Lease) -> None:
        died_with = {sample.job.id for sample in self._generation.died_with}
        jobs = list(self._held)
        self._generation.clear()
        try:
            await self._handback.release(lease, [held for held in jobs if held.id in died_with], lost=True)
            await self._handback.release(lease, [held for held in jobs if held.id not in died_with])
        except (RedisError, OSError) as error:
            raise LeaseLost(f"the dead engine's jobs could not be handed back: {error}") from error

    async def _start_again(self) -> None:
        """Start the engine, more than once: the memory and ports of the dead one may not be free yet."""
        for pause_s in RETRIES_S:
            try:
                await self._engine.start()
            except EngineError as error:
                log.warning("the engine did not start, trying again in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
            else:
                return
        await self._engine.start()
