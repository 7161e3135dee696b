"""A scaler at work, and a watch for it that says what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rolloutmq.messages import WorkerStatus
from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.scale import CrashLoop, PoolView, Scaler, ScalerLock


class Seen:
    """A watch that says what a test says."""

    def __init__(self, view: PoolView | None = None) -> None:
        self.view, self.workers = view, tuple[WorkerStatus, ...]()

    async def look(self) -> PoolView | None:
        return self.view


@asynccontextmanager
async def scaling(scaler: Scaler, lock: ScalerLock, ends_s: float = 60) -> AsyncIterator[asyncio.Task[None]]:
    """A scaler at work; afterwards it and its workers are gone. ends_s: how long that may take."""
    await lock.take()
    task = asyncio.create_task(scaler.run())
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, CrashLoop, ConfigError):
            await asyncio.wait_for(task, ends_s)
        scaler.kill_all()
