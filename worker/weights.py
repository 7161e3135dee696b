"""The worker's part in weight sync: join a transfer, fall silent, receive, verify, go on under the new version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from ..messages.errors import EngineDead, MessageError
from ..messages.weights import WeightAnnouncement
from ..sync.ledger import Epoch, Ledger
from ..sync.transfer import TransferOrder, TransferReport
from .engine import Engine
from .generation import Generation

log = logging.getLogger(__name__)
SEAL_GRACE_S = 2.0
"""How much longer than the trainer's own join deadline a worker waits for the seal."""
STUCK_S = 30.0
LOOK_S = 1.0
"""Without a poke the ledger is looked at this often."""


class WeightFollower:
    """Follows the ledger for one worker.

    on_corrupt(): a load broke off half way; the engine's weights are neither old nor new.
    in_service: False until the worker has verified the newest version that was committed when it came.
    """

    def __init__(self, engine: Engine, generation: Generation, ledger: Ledger, on_corrupt: Callable[[], None]) -> None:
        self.in_service = False
        self.updating = False
        self._engine, self._generation, self._ledger = engine, generation, ledger
        self._on_corrupt = on_corrupt
        self._seen_epoch = 0
        self._halted = False
        self._poked = asyncio.Event()

    def poke(self) -> None:
        """Look at the ledger now."""
        self._poked.set()

    def halt(self) -> None:
        """Take part in nothing until `restarted`: there is no engine to load into."""
        self._halted = True

    def restarted(self) -> None:
        """The engine has its base weights again: version 0, and maybe behind."""
        self._halted = False
        self._generation.version = 0
        self.in_service = False
        self._seen_epoch = 0
        self.poke()

    async def run(self, worker_id: str, on_change: Callable[[], None]) -> None:
        """Follow until cancelled. on_change(): `in_service` or the version may be different now."""
        asked = 0.0
        while True:
            self._poked.clear()
            try:
                committed = await self._ledger.committed()
                if not self.in_service and self._generation.version >= committed:
                    self.in_service = True
                    on_change()
                number = await self._ledger.open_epoch()
                # Not "greater": the numbers start again in a Redis that lost its data.
                if number and number != self._seen_epoch and not self._halted:
                    self._seen_epoch = number
                    await self._take_part(number, worker_id)
                    on_change()
                    continue
                if self._generation.version < committed and time.monotonic() - asked > LOOK_S:
                    asked = time.monotonic()
                    await self._ledger.want(worker_id, self._generation.version)
            except (RedisError, OSError, MessageError) as error:
                log.warning("the weights ledger cannot be read: %s", error)
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._poked.wait()
            except TimeoutError:
                continue

    async def _take_part(self, number: int, worker_id: str) -> None:
        epoch = await self._ledger.epoch(number)
        if epoch is None or epoch.state != "joining" or epoch.announcement.version <= self._generation.version:
            return
        announcement = epoch.announcement
        if announcement.mode == "in_place":
            log.warning("version %s is to be loaded in place, which this worker cannot", announcement.version)
            return
        if announcement.mode != "drain":
            await self._join_and_load(announcement, worker_id)
            return
        self._generation.close_gate("update")
        try:
            # Who cannot finish in the time the trainer gives stays on the old version and asks again later.
            if await self._generation.idle(announcement.join_timeout_s):
                await self._join_and_load(announcement, worker_id)
        finally:
            self._generation.open_gate("update")

    async def _join_and_load(self, announcement: WeightAnnouncement, worker_id: str) -> None:
        number = announcement.epoch
        if not await self._ledger.join(number, worker_id, self._engine.info.tp_size):
            return
        sealed = await self._sealed(number, time.monotonic() + announcement.join_timeout_s + SEAL_GRACE_S)
        if sealed is None or worker_id not in sealed.announcement.roster:
            return
        announcement = sealed.announcement
        self.updating = True
        try:
            async with self._generation.quiet():
                try:
                    report = await self._load(announcement, worker_id)
                except asyncio.CancelledError:
                    self._on_corrupt()  # the transfer goes on in the engine: what it will hold is not known
                    raise
                if report.ok:
                    self._generation.version = announcement.version
                    self.in_service = True
        except EngineDead as error:
            report = TransferReport(ok=False, phase="rendezvous", error=str(error))
        finally:
            self.updating = False
        if not report.ok:
            log.warning("version %s was refused in %s: %s", announcement.version, report.phase, report.error)
        try:
            await self._ledger.report(number, worker_id, report)
        finally:
            if not report.intact:
                self._on_corrupt()

    async def _load(self, announcement: WeightAnnouncement, worker_id: str) -> TransferReport:
        order = TransferOrder(
            version=announcement.version,
            epoch=announcement.epoch,
            backend=announcement.backend,
            host=announcement.host,
            port=announcement.port,
            group=f"epoch-{announcement.epoch}",
            rank_offset=announcement.roster[worker_id],
            world_size=announcement.world_size,
            timeout_s=announcement.transfer_timeout_s,
        )
        try:
            # The engine keeps to the order's own deadline; this one is for an engine that is stuck.
            async with asyncio.timeout(2 * order.timeout_s + STUCK_S):
                return await self._engine.load_weights(order)
        except Exception as error:  # nothing is known about the weights now: as bad as a load that broke off
            return TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}")

    async def _sealed(self, number: int, deadline: float) -> Epoch | None:
        """The epoch once it is sealed; None if it closed, vanished or was never sealed in time."""
        while time.monotonic() < deadline:
            self._poked.clear()
            epoch = await self._ledger.epoch(number)
            if epoch is None or epoch.state == "closed":
                return None
            if epoch.state == "sealed":
                return epoch
            try:
                async with asyncio.timeout(min(LOOK_S, max(0.001, deadline - time.monotonic()))):
                    await self._poked.wait()
            except TimeoutError:
                continue
        return None
