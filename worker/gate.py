"""Gates that several parties may hold shut, and the turn of whoever touches an engine's weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..messages.errors import EngineError


async def set_within(event: asyncio.Event, timeout_s: float | None) -> bool:
    """Wait for `event`. False if it is not set within `timeout_s` seconds; None waits for ever."""
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False


class Gate:
    """Open unless somebody holds it. Belongs to one event loop.

    on_change(): is called after each change of who holds it. It is the place to decide what may happen now.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._holders: set[Holder] = set()
        self._held_s: dict[str, float] = {}
        self._opened = asyncio.Event()
        self._opened.set()

    def holder(self, reason: str) -> Holder:
        """A new holder, which does not hold yet. reason: what `reasons` says while it does."""
        return Holder(self, reason)

    @property
    def is_open(self) -> bool:
        return not self._holders

    @property
    def reasons(self) -> list[str]:
        """Why it is shut, once for each holder, sorted."""
        return sorted(holder.reason for holder in self._holders)

    def held_s(self, now: float) -> dict[str, float]:
        """Seconds for which it has been held so far, by reason. now: on time.monotonic. Any thread may ask."""
        found = self._held_s.copy()
        for holder in self._holders.copy():
            found[holder.reason] = found.get(holder.reason, 0.0) + max(0.0, now - holder.since)
        return found

    async def opened(self) -> None:
        """Return as soon as nobody holds it."""
        while self._holders:
            await self._opened.wait()

    def _change(self, holder: Holder, holds: bool) -> None:
        if holds == (holder in self._holders):
            return
        now = time.monotonic()
        if holds:
            holder.since = now
            self._holders.add(holder)
            self._opened.clear()
        else:
            self._holders.remove(holder)
            self._held_s[holder.reason] = self._held_s.get(holder.reason, 0.0) + now - holder.since
            if not self._holders:
                self._opened.set()
        self._on_change()


class Holder:
    """One party that may hold a gate: by `acquire` and `release`, or as a `with` block.

    A gate opens when its last holder has released it. Two holders are two, though their reasons are the same. One
    holder holds once: to acquire or to release it again changes nothing.
    """

    def __init__(self, gate: Gate, reason: str) -> None:
        self.reason = reason
        self.since = 0.0
        self._gate = gate

    @property
    def holds(self) -> bool:
        return self in self._gate._holders

    def acquire(self) -> None:
        self._gate._change(self, True)

    def release(self) -> None:
        self._gate._change(self, False)

    def __enter__(self) -> Holder:
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()


class WeightsTurn:
    """Whoever changes an engine's weights, needs them unchanged, or replaces the engine takes its turn first."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._taken_by = ""

    def locked(self) -> bool:
        """Whether somebody has the turn."""
        return self._lock.locked()

    @asynccontextmanager
    async def take(self, what: str, deadline: float | None = None) -> AsyncIterator[None]:
        """Wait for the turn, and have it inside the block.

        what: for the errors of others. deadline: on time.monotonic; None waits for ever.

        Raises EngineError if others have the turn until the deadline.
        """
        left_s = None if deadline is None else max(0.001, deadline - time.monotonic())
        try:
            async with asyncio.timeout(left_s):
                await self._lock.acquire()
        except TimeoutError:
            raise EngineError(f"{what}: {self._taken_by} is under way, and did not end in time") from None
        self._taken_by = what
        try:
            yield
        finally:
            self._lock.release()
