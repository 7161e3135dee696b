"""Versions of a pool into an engine through SGLang's own update group, checked before and after.

It cannot be called off once it has begun, so it does not begin before every engine of the transfer stands still and is
ready: what goes wrong until then leaves all of them as they were.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Any, Literal

from ...messages.errors import EngineError, TransferTimeout, WeightSyncError
from ...sync.transfer import TransferOrder, TransferReport
from ...sync.wire import EpochKeys, StockRequest, fetch, fetch_manifest, join_store, lot_bytes, requests_for, why_broken
from .channel import Channel
from .stock import StockReceiver
from .weights import commit_weights

log = logging.getLogger(__name__)


class StockUpdates:
    """The updates of one engine, from its start to its end. Its group is kept as long as the sender keeps it."""

    def __init__(self, manager: Any, channel: Channel, *, loader: str, tp_size: int) -> None:
        """manager: SGLang's tokenizer manager. channel, loader: as for `commit_weights`."""
        self._manager, self._channel, self._loader, self._tp_size = manager, channel, loader, tp_size
        self._member: StockReceiver | None = None
        self._of = ""

    async def commit(self, order: TransferOrder) -> TransferReport:
        """Take part in a transfer that every rank has prepared; no request may be running.

        Names are checked first, what the parameters hold last. Raises EngineError if the engine got stuck: only its
        end gets it out.
        """
        began = time.monotonic()
        deadline = began + order.timeout_s
        report = await self._check(order, "plan")
        if not report.ok:
            return report
        await self._leave(order, deadline)
        try:
            requests = await asyncio.to_thread(self._meet, order, deadline)
            member = await self._join(order, deadline)
        except WeightSyncError as error:
            return _failed("rendezvous", error)
        met = time.monotonic()
        checked: list[TransferReport] = []

        async def check() -> None:
            checked.append(await self._check(order, "check"))

        try:
            await member.receive(requests, timeout_s=_left(deadline), after=check)
        except TransferTimeout as error:
            raise EngineError(str(error)) from error
        except WeightSyncError as error:
            return dataclasses.replace(_failed("receive", error), intact=False)
        (report,) = checked
        if not report.ok:
            return dataclasses.replace(report, intact=False)
        return dataclasses.replace(report, rendezvous_s=met - began, receive_s=time.monotonic() - met - report.load_s)

    def _meet(self, order: TransferOrder, deadline: float) -> list[StockRequest]:
        """Say that this engine stands still, and wait until all do. Blocks; raises TransferTimeout if one does not."""
        store = join_store(order.host, order.port, _left(deadline))
        broken, keys = why_broken(store, order.epoch), EpochKeys(order.epoch)
        manifest = fetch_manifest(store, order.epoch, order.version, deadline, broken)
        try:
            for rank in range(self._tp_size):
                store.set(keys.ready(order.rank_offset + rank), "1")
        except RuntimeError as error:
            raise TransferTimeout(f"the sender is gone: {error}") from error
        fetch(store, keys.go, deadline, broken, "word that all are ready")
        return requests_for(manifest, lot_bytes(manifest))

    async def _leave(self, order: TransferOrder, deadline: float) -> None:
        """Out of a group that the sender does not use any more."""
        if self._member is None or self._of == _identity(order):
            return
        try:
            await self._member.leave(_left(deadline))
        except TransferTimeout as error:
            raise EngineError(str(error)) from error
        except WeightSyncError as error:
            log.warning("group %s was not given up: %s", self._member.name, error)
        self._member = None

    async def _join(self, order: TransferOrder, deadline: float) -> StockReceiver:
        if self._member is not None:
            return self._member
        member = StockReceiver(self._manager, order.group)
        try:
            await member.join(
                host=order.host,
                port=order.port,
                rank_offset=order.rank_offset,
                world=order.world_size,
                backend=order.backend,
                timeout_s=_left(deadline),
            )
        except TransferTimeout as error:
            raise EngineError(str(error)) from error
        self._member, self._of = member, _identity(order)
        return member

    async def _check(self, order: TransferOrder, step: Literal["plan", "check"]) -> TransferReport:
        return await commit_weights(
            self._manager, self._channel, order, loader=self._loader, tp_size=self._tp_size, stock=step
        )


def _identity(order: TransferOrder) -> str:
    """Of a group: two trainers can give theirs the same name."""
    return f"{order.host}:{order.port}/{order.group}"


def _left(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _failed(phase: Literal["rendezvous", "receive"], error: Exception) -> TransferReport:
    return TransferReport(ok=False, phase=phase, error=f"{type(error).__name__}: {error}")
