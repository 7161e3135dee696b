"""A version on its way from a trainer to the pool."""

from __future__ import annotations

import asyncio
from typing import Any


class WeightTransferHandle:
    """What `start_weight_transfer` returns. request: what it was given."""

    def __init__(self, request: Any, task: asyncio.Task[str]) -> None:
        self.request = request
        self._task = task
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told by `wait`, or not at all

    async def wait(self) -> str:
        """The version, once the pool serves it. Raises what became of it instead. May be called again and again."""
        return await asyncio.shield(self._task)

    @property
    def is_complete(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._task.done()

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it is under way, and if it did not."""
        if not self._task.done():
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    def cancel(self) -> None:
        """Do not wait for it any more; what is being published goes on."""
        self._task.cancel()
