"""A transfer without its bytes: the order and the report, the ledger in Redis, and the steps of a transfer.

No torch.
"""

from .ledger import Epoch, Join, Ledger, LedgerView, TransferRecord, VersionRecord, nccl_settings, through_outage
from .order import SENDER_GONE, Phase, TransferOrder, TransferReport
from .patience import Patience
from .rounds import GLANCE_S, GRACE_S, Transfer, TransferResult, repeated
from .settings import SyncOptions, SyncSettings

__all__ = [
    "GLANCE_S",
    "GRACE_S",
    "SENDER_GONE",
    "Epoch",
    "Join",
    "Ledger",
    "LedgerView",
    "Patience",
    "Phase",
    "SyncOptions",
    "SyncSettings",
    "Transfer",
    "TransferOrder",
    "TransferRecord",
    "TransferReport",
    "TransferResult",
    "VersionRecord",
    "nccl_settings",
    "repeated",
    "through_outage",
]
