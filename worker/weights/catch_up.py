"""Catching up from disk: a worker that is behind takes the committed version from a snapshot, if there is one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...messages.errors import EngineDead
from ...sync.transfer import TransferOrder, TransferReport
from .snapshots import Snapshots

log = logging.getLogger(__name__)
Preparing = asyncio.Task[TransferReport]


class CatchUp:
    """Reads a snapshot while the follower waits for transfers. If the version comes by a transfer, that goes first.

    prepare(order, why): starts the first half of an update. Returns None if the engine may not load now.
    commit(order, report): runs the second half after the first one's report. Returns None if it is not needed any more.
    """

    def __init__(
        self,
        snapshots: Snapshots | None,
        prepare: Callable[[TransferOrder, str], Awaitable[Preparing | None]],
        commit: Callable[[TransferOrder, TransferReport], Awaitable[TransferReport | None]],
    ) -> None:
        self._snapshots, self._prepare, self._commit = snapshots, prepare, commit
        self._reading: tuple[TransferOrder, Preparing] | None = None

    @property
    def reads(self) -> bool:
        """Whether a snapshot is being read."""
        return self._reading is not None

    async def look(self, here: int, committed: int, digest: str) -> bool:
        """Begin to read, or load what has been read. Returns True if version `committed` has just been loaded.

        here: the version that the engine has. digest: of the committed version's manifest.
        """
        if self._snapshots is None or here >= committed:
            self.stop()
        elif self._reading is None:
            order = await self._snapshots.order(committed, digest) if digest else None
            preparing = await self._prepare(order, f"version {committed} is on disk") if order is not None else None
            if order is not None and preparing is not None:
                self._reading = order, preparing
        elif self._reading[1].done():
            (order, preparing), self._reading = self._reading, None
            return await self._load(self._snapshots, order, preparing)
        return False

    async def _load(self, snapshots: Snapshots, order: TransferOrder, preparing: Preparing) -> bool:
        try:
            report = await self._commit(order, preparing.result())
        except EngineDead:
            return False
        if report is None:
            return False
        if report.ok:
            log.info("version %s was read from %s", order.version, order.path)
        elif report.intact:  # otherwise the engine failed, and not the snapshot
            snapshots.refuse(order.version, f"{report.phase}: {report.error}")
        return report.ok

    def stop(self) -> None:
        """Forget a read under way. The engine drops it when it prepares something else."""
        if self._reading is not None:
            self._reading[1].cancel()
        self._reading = None
