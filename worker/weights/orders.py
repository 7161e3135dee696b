"""From what is announced to what the engine is told: one worker's order for a transfer."""

from __future__ import annotations

from ...messages.errors import InvalidField
from ...messages.model import Transport, WeightAnnouncement
from ...sync.transfer import STOCK_GONE, TransferOrder


def order_for(announcement: WeightAnnouncement, worker_id: str) -> TransferOrder:
    """What a sealed announcement asks of this worker, which is in its roster.

    Raises InvalidField for a transfer through SGLang's own update group, as older trainers send them.
    """
    if announcement.stock:
        raise InvalidField("transfer", "stock", STOCK_GONE)
    rank = announcement.roster[worker_id]
    transport: Transport = announcement.backend if rank else "ipc"
    return TransferOrder(
        version=announcement.version,
        epoch=announcement.epoch,
        transport=transport,
        host=announcement.host,
        port=announcement.port,
        group=announcement.group,
        rank_offset=rank,
        world_size=announcement.world_size,
        timeout_s=announcement.deadline_s,
        drain_s=announcement.join_timeout_s,
        mode=announcement.mode,
        verify=announcement.verify,
        nonfinite=announcement.nonfinite,
    )
