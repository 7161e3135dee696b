"""A worker around an engine that is up already, to measure what joining a pool costs without the engine's start."""

from __future__ import annotations

import asyncio
from typing import Any

from rolloutmq.sync.transfer import TransferOrder, TransferReport
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.engine import Engine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from .child import now

GLANCE_S = 0.001


class _Adopted:
    """An engine that `start` and `close` leave running. It remembers when it had which version."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.loaded: list[tuple[int, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self, *, empty: bool = False) -> None:
        """Do nothing, because it runs."""

    async def close(self) -> None:
        """Do nothing, so that it continues."""

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        report = await self._engine.commit_weights(order)
        if report.ok:
            self.loaded.append((order.version, now()))
        return report


class PoolMember:
    """One stay in a pool."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self._adopted = _Adopted(engine)
        self._worker = Worker(config, self._adopted, NoTokenizer())
        self._running: asyncio.Task[None] | None = None

    async def join(self, timeout_s: float) -> None:
        """Wait until it holds a lease. Raises TimeoutError, or the error that ended the worker."""
        self._running = asyncio.create_task(self._worker.run())
        joined = asyncio.create_task(self._worker.joined.wait())
        await asyncio.wait({joined, self._running}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running
        if not joined.done():
            joined.cancel()
            raise TimeoutError("the worker has not joined the pool in time")

    async def loaded(self, version: int, timeout_s: float) -> float:
        """Wait for `version` or a newer one. Returns when it was verified and loaded. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while True:
                for number, moment in self._adopted.loaded:
                    if number >= version:
                        return moment
                await asyncio.sleep(GLANCE_S)

    async def leave(self, timeout_s: float) -> None:
        """Drain."""
        self._worker.drain()
        if self._running is not None:
            async with asyncio.timeout(timeout_s):
                await self._running
