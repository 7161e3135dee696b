"""Loops over outcomes: as they arrive, group by group, or while more jobs are submitted.

Coming back for the next item acknowledges the one before, also by beginning another loop. A call for the next item that
is cancelled, or times out, has taken nothing, and the loop can go on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Collection, Iterable
from typing import Generic, Self, TypeVar, cast

from ...messages.broker import Reply
from ...messages.errors import InvalidField, PoolBusy, RolloutMQError, WaitTimeout
from ...messages.model import GenerateJob
from ...messages.progress import Bar
from ..core import ClientCore
from ..inbox import Group, HandOut, Outcome, as_group, calling_code
from .batch import RETRY_S

T = TypeVar("T")


class Loop(AsyncIterator[T], Generic[T]):
    """An iterator of one client, for one task at a time. timeout: seconds to wait for an item; None waits for ever.

    progress: a bar that moves with what is handed out, and ends with the loop; see RolloutClient.map.
    asked: a caller in another thread has come back for the next item. It says so itself, because Ctrl-C may end its
    call before anything of that runs here.
    """

    counts = "samples"
    """What a bar says that it counts."""

    def __init__(self, core: ClientCore, timeout: float | None, progress: bool | str = False) -> None:
        self._core, self._inbox, self._timeout = core, core.inbox, timeout
        self._last: HandOut | None = None
        self._bar = (Bar(progress, self.counts) or None) if progress else None
        self.asked = False
        self._code = calling_code()  # not in __anext__, which `asyncio.wait_for` may run in a task of its own
        self._begun = self._over = self._waiting = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._waiting:
            raise RolloutMQError("another task waits for the next item of this loop: each task needs a loop of its own")
        if self._last is not None:
            self._last.acknowledge()
            self._last = None
        if not self._begun:
            self._begun = True
            self._core.left_loops.begins(self._code)
        if self._over:
            raise StopAsyncIteration
        self._waiting = True
        try:
            await self._wait()
        except BaseException:
            self._end_bar()
            raise
        finally:
            self._waiting = False
        found = self._take()
        if found is None:
            self._over = True
            self._end_bar()
            raise StopAsyncIteration
        item, replies = found
        self._last, self.asked = self._core.hand_out(replies), False
        if self._bar is not None:
            self._count(item, self._bar)
        return item

    async def aclose(self) -> None:
        """End the loop. Its last item is acknowledged when its code begins another loop, or now if that was `asked`."""
        self._over = True
        self._end_bar()
        last, self._last = self._last, None
        if last is not None and self.asked:
            last.acknowledge()
        elif last is not None:
            self._core.left_loops.put(self._code, last)

    def __del__(self) -> None:  # a loop that is left by `break` or an error is collected, and not closed
        if self._last is not None:
            self._core.left_loops.put(self._code, self._last)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _count(self, item: T, bar: Bar) -> None:
        """An item is handed out."""

    @abstractmethod
    async def _wait(self) -> None:
        """Return when there is something to take, or nothing is to come."""

    @abstractmethod
    def _take(self) -> tuple[T, list[Reply]] | None:
        """The next item and what it is made of; None if nothing is to come."""


class Results(Loop[Outcome]):
    """See RolloutClient.results."""

    async def _wait(self) -> None:
        await self._core.until(lambda: len(self._inbox) > 0 or not self._inbox.free, self._timeout)

    def _take(self) -> tuple[Outcome, list[Reply]] | None:
        reply = self._inbox.take_next()
        return None if reply is None else (cast(Outcome, reply.outcome), [reply])  # tasks are in the other inbox


class Groups(Loop[Group]):
    """See RolloutClient.groups."""

    counts = "groups"

    async def _wait(self) -> None:
        await self._core.until(lambda: self._inbox.full_group() is not None or not self._inbox.free, self._timeout)

    def _take(self) -> tuple[Group, list[Reply]] | None:
        if (group_id := self._inbox.full_group()) is None:
            return None
        replies = self._inbox.take_group(group_id)
        return as_group(group_id, replies), replies

    def _count(self, item: Group, bar: Bar) -> None:
        bar.total = bar.done + 1 + self._inbox.groups
        bar.add(failed=not item.ok)


class Mapped(Results):
    """See RolloutClient.map."""

    def __init__(
        self,
        core: ClientCore,
        jobs: Iterable[GenerateJob],
        window: int,
        timeout: float | None,
        progress: bool | str = False,
    ) -> None:
        super().__init__(core, timeout, progress)
        if window < 1:
            raise InvalidField("window", window, "at least 1")
        self._source, self._window = iter(jobs), window
        self._batch: list[GenerateJob] = []  # not accepted yet
        self._exhausted = False
        self._left: dict[str, int] = {}  # of each job the samples that have not come; for a bar alone
        if self._bar is not None and isinstance(jobs, Collection):
            self._bar.total = sum(getattr(job, "n", 1) for job in jobs)
        self._round = 0  # outcomes to take before the next submission, so that it is a batch and not one job at a time

    async def _wait(self) -> None:
        inbox = self._inbox
        self._round -= 1
        while self._round <= 0 or not len(inbox):
            busy = await self._refill()
            try:
                if busy:
                    await self._core.until(lambda: len(inbox) > 0, RETRY_S)
                else:
                    await super()._wait()
            except WaitTimeout:
                if not busy:
                    raise
            self._round = len(inbox)
            if not self._round and not inbox.free and not self._batch and self._exhausted:
                return

    async def _refill(self) -> bool:
        """Submit up to the window. Returns whether the pool is too full for that."""
        while not self._exhausted and len(self._batch) + self._inbox.free < self._window:
            job = next(self._source, None)
            self._exhausted = job is None
            if job is not None:
                self._batch.append(job)
                if self._bar is not None and isinstance(job, GenerateJob):
                    self._left[job.id] = job.n
        if not self._batch:
            return False
        try:
            await self._core.submit_many(self._batch, 0.0)
        except PoolBusy as busy:
            # What is in is not sent again: once it has been taken, the pool may forget it, and would run it again.
            left = set(range(busy.accepted, len(self._batch))) - busy.beyond
            self._batch = [self._batch[place] for place in sorted(left)]
            return True
        self._batch = []
        return False

    def _count(self, item: Outcome, bar: Bar) -> None:
        """A job that failed has all of its samples behind it."""
        left = self._left.pop(item.job_id, 1)
        if item.ok and left > 1:
            self._left[item.job_id] = left - 1
        bar.add(1 if item.ok else left, failed=0 if item.ok else left)
