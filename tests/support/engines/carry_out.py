"""One transfer from a trainer's hub to an engine, without a pool around them."""

from __future__ import annotations

import asyncio
from typing import Any

from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.publish.hub import Hub
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.sglang.engine import SGLangEngine


async def carry_out(
    engine: SGLangEngine, hub: Hub, snapshot: Snapshot, epoch: int, timeout_s: float, **told: Any
) -> TransferReport:
    """One transfer to worker "w", both halves. told: other fields of its announcement."""
    outgoing = await asyncio.to_thread(hub.offer, snapshot, {"w"})
    host, _, port = hub.address.rpartition(":")
    announcement = WeightAnnouncement(
        version=snapshot.manifest.version,
        epoch=epoch,
        host=host,
        port=int(port),
        token=outgoing.token,
        digest=snapshot.manifest.fingerprint,
        join_timeout_s=timeout_s,
        transfer_timeout_s=timeout_s,
        **told,
    )
    order = TransferOrder.of_announcement(announcement, "w")
    try:
        report = await engine.prepare_weights(order)
        return await engine.commit_weights(order) if report.ok else report
    finally:
        await asyncio.to_thread(hub.withdraw, outgoing, "it is over")
