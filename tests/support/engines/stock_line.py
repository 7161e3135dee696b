"""One engine and the sender's end of SGLang's own update group, without a pool around them."""

from __future__ import annotations

import asyncio

import torch

from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.ledger import Join
from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.sync.wire.broadcaster import Broadcaster
from rolloutmq.worker.sglang.engine import SGLangEngine
from rolloutmq.worker.weights.orders import order_for

TIMEOUT_S = 60.0


class StockLine:
    """Sends versions to `engine`. group: the one that it is in."""

    def __init__(self, engine: SGLangEngine) -> None:
        self.engine, self.ranks = engine, engine.config.tp_size
        self.broadcaster = Broadcaster("127.0.0.1", 0)
        self.group = ""
        self._epoch = 0

    async def send(self, snapshot: Snapshot) -> TransferReport:
        """Both halves of one transfer, and both ends of it; the engine must be idle."""
        self._epoch += 1
        roster, joins = {"w": 1}, {"w": Join(self.ranks, group=self.group)}
        self.broadcaster.offer(self._epoch, snapshot)
        announcement = WeightAnnouncement(
            version=snapshot.manifest.version,
            epoch=self._epoch,
            host="127.0.0.1",
            port=self.broadcaster.store.port,
            join_timeout_s=TIMEOUT_S,
            transfer_timeout_s=TIMEOUT_S,
            roster=roster,
            world_size=1 + self.ranks,
            group=self.broadcaster.name_group(self._epoch, roster, joins, stock=True),
            backend="nccl" if snapshot.device.type == "cuda" else "gloo",
            stock=True,
        )
        report = await carry_out(self.engine, self.broadcaster, snapshot, announcement, TIMEOUT_S, phase="ready")
        self.group = announcement.group if report.ok else ""
        return report


async def carry_out(
    engine: SGLangEngine,
    broadcaster: Broadcaster,
    snapshot: Snapshot,
    announcement: WeightAnnouncement,
    timeout_s: float,
    *,
    phase: str | None = None,
) -> TransferReport:
    """One transfer to worker "w", sent from a thread. phase: what its first half, if it succeeds, has to come to."""
    order = order_for(announcement, "w")
    sending = asyncio.create_task(asyncio.to_thread(broadcaster.send, snapshot, announcement, timeout_s))
    report = await engine.prepare_weights(order)
    if report.ok:
        assert phase in {None, report.phase}
        report = await engine.commit_weights(order)
    if not report.ok:
        broadcaster.give_up(report.error)
    await asyncio.wait({sending})
    if report.ok:
        sending.result()
    else:
        sending.exception()
    return report


def flip(buffers: list[torch.Tensor], lot: list[tuple[str, torch.Tensor]], victim: str) -> None:
    """One bit of `victim`, if it is in this lot."""
    place = 0
    for name, tensor in lot:
        if name == victim:
            buffers[0][place + 7] ^= 1
        place += tensor.numel() * tensor.element_size()
