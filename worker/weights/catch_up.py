"""Catching up: a worker that is behind takes the committed version by itself, from a folder or from whoever has it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ...messages.errors import EngineDead
from ...sync.transfer import Ledger, TransferOrder, TransferReport
from .snapshots import Snapshots

log = logging.getLogger(__name__)
Preparing = asyncio.Task[TransferReport]
TAKE_S = 300.0
"""Seconds that a version may take to come from others. Nobody waits for it."""
LONGEST_PAUSE_S = 60.0


class CatchUp:
    """Gets a version while the follower waits for transfers. If one brings it, that goes first.

    prepare(order): starts the first half of an update. commit(order, report): runs the second half after the first
    one's report. Returns None if it is not needed any more. keeps: the worker keeps a version of its own, which the
    ledger may have forgotten: then what the folder has under that number counts.
    """

    def __init__(
        self,
        ledger: Ledger,
        snapshots: Snapshots | None,
        prepare: Callable[[TransferOrder], Preparing],
        commit: Callable[[TransferOrder, TransferReport], Awaitable[TransferReport | None]],
        *,
        keeps: bool = False,
    ) -> None:
        self._keeps = keeps
        self._ledger, self._snapshots, self._prepare, self._commit = ledger, snapshots, prepare, commit
        self._under_way: tuple[TransferOrder, Preparing] | None = None
        self._failures, self._not_before = 0, 0.0
        self.behind = self.trouble = ""
        """Which version is missing here, and why it has not come, as the last attempt found it; "" if none is."""

    @property
    def refused(self) -> tuple[int, str]:
        """As `Snapshots.refused`."""
        return (0, "") if self._snapshots is None else self._snapshots.refused

    @property
    def under_way(self) -> bool:
        """Whether a version is on its way."""
        return self._under_way is not None

    async def look(self, worker_id: str, here: int, committed: int, digest: str) -> TransferReport | None:
        """Begin to get the committed version, or load what has come. Returns the report once that is over.

        here: the version that the engine has. digest: of the committed version's manifest.
        """
        if here >= committed:
            self.stop()
            self._failures, self._not_before = 0, 0.0
            return None
        self.behind = f"the pool has version {committed}, and this worker {here}"
        if self._keeps:
            self.behind = f"this worker is to keep version {committed}, and has {here}"
        if self._under_way is None and time.monotonic() >= self._not_before:
            await self._begin(worker_id, committed, digest)
        elif self._under_way is not None and self._under_way[1].done():
            (order, preparing), self._under_way = self._under_way, None
            return await self._load(order, preparing)
        return None

    async def _begin(self, worker_id: str, committed: int, digest: str) -> None:
        may_read = self._snapshots is not None and (digest or self._keeps)
        order = await self._snapshots.order(committed, digest) if self._snapshots and may_read else None
        if order is not None:
            self.trouble = ""
        else:
            trainer, workers = await self._ledger.holders(committed)
            if trainer is None and not workers:
                where = "has no --snapshots" if self._snapshots is None else "does not find it in its --snapshots"
                self.trouble = f"nobody offers it, and this worker {where}"
                return
            order = TransferOrder.from_holders(trainer, workers, digest, worker_id, timeout_s=TAKE_S)
        self._under_way = order, self._prepare(order)

    async def _load(self, order: TransferOrder, preparing: Preparing) -> TransferReport | None:
        try:
            report = await self._commit(order, preparing.result())
        except EngineDead:
            return None
        if report is None:
            return None
        if report.ok:
            log.info("version %s came from %s", order.version, order.path or "others")
            return report
        if order.path and report.intact and self._snapshots is not None:  # otherwise the engine failed
            self._snapshots.refuse(order.version, f"{report.phase}: {report.error}")
        elif not order.path:
            log.warning("version %s could not be taken: %s: %s", order.version, report.phase, report.error)
            self.trouble = f"who offers it cannot give it: {report.phase}: {report.error}"
            self._not_before = time.monotonic() + min(LONGEST_PAUSE_S, 2.0**self._failures - 1.0)
            self._failures += 1
        return report

    def stop(self) -> None:
        """Forget what is under way, or is missing. The engine drops it when it prepares something else."""
        if self._under_way is not None:
            self._under_way[1].cancel()
        self._under_way = None
        self.behind = self.trouble = ""
