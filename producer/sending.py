"""How jobs are put in: as far as there is room, and again while the pool is full."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ..messages import tracing
from ..messages.broker import Broker, Frames
from ..messages.errors import InvalidField, PoolBusy
from ..messages.progress import Bar
from .diagnosis import FIRST_S

log = logging.getLogger(__name__)
FULL = {"jobs": "pool-full", "bytes": "pool-full", "unread": "client-full", "memory": "redis-memory"}
"""What a PoolBusy.reason is as a cause."""
COUNTED = 1024
"""Jobs that are sent between two looks at a bar."""
J = TypeVar("J")
Sent = tuple[list[str], PoolBusy | None]
"""The state of each job, "" for one that was not accepted; and the error of a full pool."""


Send = Callable[[Sequence[J]], Awaitable[Sent]]


async def enqueued(broker: Broker, jobs: Sequence[Any], frames: Frames | None = None) -> Sent:
    """What `Broker.enqueue` answers, or raises."""
    try:
        return await broker.enqueue(jobs, frames=frames), None
    except PoolBusy as busy:
        return [*busy.states, *("q" if place in busy.beyond else "" for place in range(busy.accepted, len(jobs)))], busy


async def enqueued_together(broker: Broker, asked: Sequence[Sequence[Any]]) -> list[Sent | Exception]:
    """`enqueued` of several calls, each with jobs of its own, as if each had come alone."""
    found: list[Sent | Exception] = []
    while left := asked[len(found) :]:
        try:
            states, busy = await enqueued(broker, [job for jobs in left for job in jobs])
        except InvalidField as refused:  # a job of one of them: what is in already stays there when it comes again
            alone = [await enqueued_together(broker, [jobs]) for jobs in left] if len(left) > 1 else [[refused]]
            return found + [one for only in alone for one in only]
        for jobs in left:
            mine, states = states[: len(jobs)], states[len(jobs) :]
            found.append((mine, None if all(mine) else busy))
            if not all(mine):
                break  # behind it may be smaller ones, for which there is room
    return found


async def send_all(send: Send[J], jobs: Sequence[J], timeout: float | None) -> list[str]:
    """`send` jobs, and those that a full pool did not accept again, until all are in; returns the state of each.

    timeout: seconds; None waits for ever. Raises PoolBusy after it, counted over `jobs`.
    """
    with tracing.submission(jobs) as sent:
        return await _send_all(send, sent, timeout)


async def _send_all(send: Send[J], jobs: Sequence[J], timeout: float | None) -> list[str]:
    began, said = time.monotonic(), False
    deadline = None if timeout is None else began + timeout
    left, pause = list(range(len(jobs))), 0.02  # places of the jobs that are not in
    states: dict[int, str] = {}
    while True:
        answers, busy = await send([jobs[place] for place in left])
        # What is in is not sent again: once it has been taken, the pool may forget it, and would run it again.
        states.update((place, state) for place, state in zip(left, answers, strict=True) if state)
        if busy is None:
            return [states[place] for place in range(len(jobs))]
        left = [place for place in left if place not in states]
        if deadline is not None and time.monotonic() + pause >= deadline:
            first = [states[place] for place in range(left[0])]
            raise PoolBusy(str(busy), first, busy.reason, frozenset(place for place in states if place > left[0]))
        if not said and time.monotonic() - began >= FIRST_S:
            said = True
            log.warning("%d jobs wait for room: %s: %s", len(left), FULL[busy.reason], busy)
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # submitters that wait do not come back in step
        pause = min(0.5, pause * 2)


def counted(send: Send[J], bar: Bar) -> Send[J]:
    """`send` by the thousand, and the bar has what was accepted. What comes behind a full pool is not sent."""

    async def send_some(jobs: Sequence[J]) -> Sent:
        states: list[str] = []
        for start in range(0, len(jobs), COUNTED):
            answers, busy = await send(jobs[start : start + COUNTED])
            bar.add(sum(map(bool, answers)))
            states += answers
            if busy is not None:
                return states + [""] * (len(jobs) - len(states)), busy
        return states, None

    return send_some
