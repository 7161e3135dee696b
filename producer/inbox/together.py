"""Calls of many tasks that go to Redis together, if they come at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from .handover import own_context

A = TypeVar("A")
B = TypeVar("B")
MOST = 128
"""Calls that go together: few enough that Redis answers them at once."""


class Together(Generic[A, B]):
    """Asks for one thing. What is asked while an answer is on its way is asked together after it.

    So nobody waits for others to come, and a thousand tasks cost as many round trips as there is time for.
    """

    def __init__(self, ask: Callable[[Sequence[A]], Awaitable[Sequence[B | Exception]]]) -> None:
        """ask: returns for each what was found, or the error that its caller gets. What it raises all of them get."""
        self._ask = ask
        self._asking = False
        self._waiting: dict[asyncio.Future[B], A] = {}
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, one: A) -> B:
        """What `ask` finds. A call that is cancelled before it went to Redis never goes there."""
        if self._asking:
            place: asyncio.Future[B] = asyncio.get_running_loop().create_future()
            self._waiting[place] = one
            return await place
        self._asking = True
        try:
            found = (await self._ask([one]))[0]
        finally:
            self._go_on()
        if isinstance(found, Exception):
            raise found
        return found

    def _go_on(self) -> None:
        self._waiting = {place: one for place, one in self._waiting.items() if not place.done()}
        now = dict(islice(self._waiting.items(), MOST))
        for place in now:
            del self._waiting[place]
        self._asking = bool(now)
        if now:
            self._task = asyncio.create_task(self._ask_for(now), context=own_context())

    async def _ask_for(self, now: dict[asyncio.Future[B], A]) -> None:
        found: Sequence[B | Exception] = []
        try:
            found = await self._ask([*now.values()])
        except Exception as error:
            found = [error] * len(now)
        finally:
            self._go_on()
        for place, one in zip(now, found, strict=True):
            if place.done():
                continue
            if isinstance(one, Exception):
                place.set_exception(one)
            else:
                place.set_result(one)
