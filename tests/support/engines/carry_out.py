"""One transfer between a broadcaster and an engine, without a pool around them."""

from __future__ import annotations

import asyncio

from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.sync.wire.broadcaster import Broadcaster
from rolloutmq.worker.sglang.engine import SGLangEngine


async def carry_out(
    engine: SGLangEngine,
    broadcaster: Broadcaster,
    snapshot: Snapshot,
    announcement: WeightAnnouncement,
    timeout_s: float,
) -> TransferReport:
    """One transfer to worker "w", sent from a thread."""
    order = TransferOrder.of_announcement(announcement, announcement.roster["w"])
    sending = asyncio.create_task(asyncio.to_thread(broadcaster.send, snapshot, announcement, timeout_s))
    report = await engine.prepare_weights(order)
    if report.ok:
        report = await engine.commit_weights(order)
    if not report.ok:
        broadcaster.give_up(report.error)
    await asyncio.wait({sending})
    if report.ok:
        sending.result()
    else:
        sending.exception()
    return report
