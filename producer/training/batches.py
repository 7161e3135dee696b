"""The loop over a feed's batches, and the prompts that it has still to submit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from itertools import islice

from ...messages.errors import InvalidField
from ...messages.model import GenerateJob
from .groups import TrainGroup


class Batches(AsyncIterator[list[TrainGroup]]):
    """See RolloutFeed.batches. It has the prompts that are still to be submitted, one after the other.

    get(most, timeout, source): the feed's next batch, which it fills from this source.
    """

    def __init__(
        self,
        get: Callable[[int, float | None, Batches], Awaitable[list[TrainGroup]]],
        most: int,
        jobs: Iterable[GenerateJob],
        timeout: float | None,
    ) -> None:
        self._get, self._most, self._jobs, self._timeout = get, most, iter(jobs), timeout
        self._next: list[GenerateJob | None] = []  # empty before it was read

    def peek(self) -> GenerateJob | None:
        """The one whose turn it is; None when they are through. What `jobs` raises loses none of them.

        Raises InvalidField for what is no job.
        """
        if not self._next:
            found = list(islice(self._jobs, 1))
            if found and not isinstance(found[0], GenerateJob):
                raise InvalidField("jobs", found[0], "GenerateJobs")
            self._next = [*found] or [None]
        return self._next[0]

    def step(self) -> None:
        """That one was submitted."""
        self._next = []

    async def __anext__(self) -> list[TrainGroup]:
        if found := await self._get(self._most, self._timeout, self):
            return found
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the loop; what is under way stays with the feed."""
