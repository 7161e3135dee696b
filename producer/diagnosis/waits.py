"""What a client's waits are told: one reading of a pool for all of a process, and a word in the log about a cause."""

from __future__ import annotations

import asyncio
import logging
import time

from redis.exceptions import NoPermissionError, RedisError

from ...messages.broker import Broker
from .reading import read_pool
from .reason import NO_FAULT, Reason
from .reasons import reasons

log = logging.getLogger(__name__)
FIRST_S = 3.0
"""A wait looks at the pool when nothing has come for so long,"""
GAP_S = 1.0
"""Between two waits that count as one."""
LATER_S = 30.0
"""and then each time that it has lasted twice as long, or so much longer."""
FRESH_S = 2.0
"""A wait that gives up takes no older reading than this."""
ANSWER_S = 5.0
"""A Redis that takes longer for a reading counts as away."""
LOOK_S = 0.05
NOT_SHOWN = "What keeps its jobs is not shown to this Redis user; see  rolloutmq doctor"


async def why(broker: Broker) -> list[Reason]:
    """Read the pool, and say why its jobs wait; also if Redis is the reason. Raises NoPermissionError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            return reasons(await read_pool(broker))
    except NoPermissionError:
        raise
    except (RedisError, OSError, TimeoutError) as error:
        told = str(error) or f"Redis has not answered a reading of the pool within {ANSWER_S:g} s"
        return [Reason("redis-away", told.rstrip("."), "Start it again, or see what is between.")]


class _Shared:
    """The newest reading of one pool, for all clients of this process. They may be on several event loops."""

    def __init__(self) -> None:
        self.found: list[Reason] | None = []  # None: this user may not look
        self.read_at = float("-inf")
        self._reading = False

    async def get(self, broker: Broker, max_age_s: float) -> list[Reason] | None:
        """The reasons, no older than that; those that somebody is just reading will do."""
        for _ in range(round(2 * ANSWER_S / LOOK_S)):  # the one who reads may end with its event loop
            if not self._reading:
                break
            await asyncio.sleep(LOOK_S)
        if self.found is not None and time.monotonic() - self.read_at > max_age_s:
            self._reading = True
            try:
                found = await why(broker)
            except NoPermissionError:
                self.found = None
            else:
                self._say(found)
                self.found = found
            finally:
                self.read_at, self._reading = time.monotonic(), False
        return self.found

    def _say(self, found: list[Reason]) -> None:
        """A word in the log about each reason that was not there at the reading before."""
        before = {reason.cause for reason in self.found or ()}
        for reason in found:
            if reason.stops and reason.cause not in before:
                level = logging.INFO if reason.cause in NO_FAULT else logging.WARNING
                log.log(level, "jobs wait: %s", reason.told())


_pools: dict[tuple[str, ...], _Shared] = {}


class Waits:
    """Watches the waits of one client: call `begin` and `end` for each."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting, self._since, self._left_at = 0, 0.0, 0.0
        where = [str(getattr(part.redis, "where", "")) or str(id(part.redis)) for part in broker.parts]
        self._shared = _pools.setdefault((broker.keys.pool, *where), _Shared())
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Somebody waits."""
        if not self._waiting and (now := time.monotonic()) - self._left_at > GAP_S:
            self._since = now
        self._waiting += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FIRST_S, self._look)

    def end(self, *, came: bool) -> None:
        """Somebody waits no more. came: what was waited for."""
        self._waiting -= 1
        self._left_at = time.monotonic()
        if came:
            self._since = self._left_at

    def close(self) -> None:
        """Look no more."""
        for one in (self._timer, self._looking):
            if one is not None:
                one.cancel()

    async def told(self, lasted_s: float) -> str:
        """Why the wait that gives up now, after so many seconds, was in vain; "" if nothing is known.

        One that lasted less than FIRST_S asks only if nothing has come during others before it, and seldom.
        """
        if time.monotonic() - self._since < FIRST_S:
            return ""
        found = await self._shared.get(self._broker, FRESH_S if lasted_s >= FIRST_S else LATER_S)
        if found is None:
            return NOT_SHOWN
        return "; ".join(reason.told() for reason in found if reason.stops)

    def _look(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        quiet_s, loop = time.monotonic() - self._since, asyncio.get_running_loop()
        if quiet_s < FIRST_S:
            self._timer = loop.call_later(max(0.1, FIRST_S - quiet_s), self._look)
            return
        pause_s = min(LATER_S, quiet_s)
        self._timer = loop.call_later(pause_s, self._look)
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._ask(pause_s / 2))

    async def _ask(self, max_age_s: float) -> None:
        await self._shared.get(self._broker, max_age_s)
