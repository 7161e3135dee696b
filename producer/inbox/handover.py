"""From the inbox to the caller: outcomes are acknowledged once the caller certainly has them, or given back.

A call of the asyncio client awaits nothing between taking outcomes and returning them: no cancellation comes between.
A call of a plain loop gets them from another thread, and Ctrl-C may come on the way. Such a call has a Crossing. Its
thread says there, as the last thing before it returns, that it has them.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context

from ...messages.broker import Reply

under_way: ContextVar[Crossing | None] = ContextVar("rolloutmq_crossing", default=None)
"""The crossing of the call that runs in this task; None if its caller is in the same event loop."""


class HandOut:
    """Outcomes that were taken from an inbox, until they are acknowledged or given back, whichever comes first."""

    def __init__(
        self, replies: list[Reply], ack: Callable[[list[Reply]], None], back: Callable[[list[Reply]], None]
    ) -> None:
        self._replies, self._ack, self._back = replies, ack, back
        if (crossing := under_way.get()) is not None:
            crossing.carry(self)

    def acknowledge(self) -> None:
        """The caller has them, and will not get them again."""
        replies, self._replies = self._replies, []
        if replies:
            self._ack(replies)

    def give_back(self) -> None:
        """Nobody has them: they wait in the inbox again, before all others."""
        replies, self._replies = self._replies, []
        if replies:
            self._back(replies)


Code = asyncio.Task[object] | threading.Thread


def calling_code() -> Code:
    """The task that calls, or the thread if it runs no task."""
    try:
        return asyncio.current_task() or threading.current_thread()
    except RuntimeError:  # no event loop here
        return threading.current_thread()


def own_context() -> Context:
    """The context for a task that outlives the call that begins it: it hands nothing over to that call's thread."""
    context = copy_context()
    context.run(under_way.set, None)
    return context


class LeftLoops:
    """The last outcomes of loops that were left: the code that has them may still work on them.

    They are acknowledged when that code comes back, which is when it begins another loop. For code that has ended, any
    other code that begins a loop does it.
    """

    def __init__(self) -> None:
        self._last: list[tuple[weakref.ref[Code], HandOut]] = []

    def put(self, code: Code, out: HandOut) -> None:
        """A loop that `code` began was left after this. Called in any thread, by garbage collection."""
        self._last.append((weakref.ref(code), out))

    def begins(self, code: Code) -> None:
        """`code` begins a loop."""
        last, self._last = self._last, []
        for ref, out in last:
            other = ref()
            if other is None or other is code or _has_ended(other):
                out.acknowledge()
            else:
                self._last.append((ref, out))


def _has_ended(code: Code) -> bool:
    return code.done() if isinstance(code, asyncio.Task) else not code.is_alive()


class Crossing:
    """What one call brings from the event loop to the thread that waits for it.

    received: set by that thread. CPython runs no signal handler between this assignment and the `return` behind it, so
    a call that Ctrl-C ends has not set it. Everything else happens in the event loop.
    """

    def __init__(self) -> None:
        self.received = False
        self._lost = False
        self._carried: list[HandOut] = []

    @property
    def over(self) -> bool:
        """Whether it is known how it ended."""
        return self.received or self._lost

    def carry(self, out: HandOut) -> None:
        """Take these along; if the thread waits no longer they go back at once."""
        self._carried.append(out)
        if self._lost:
            self.lose()

    def lose(self) -> None:
        """The thread waits no longer: give back what it was to get."""
        self._lost = True
        carried, self._carried = self._carried, []
        for out in reversed(carried):
            out.give_back()
