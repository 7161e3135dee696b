"""A transfer without its bytes: the order and the report, the settings, and the ledger in Redis.

Few files: no torch, so everything that follows the ledger may import it.
"""

from .ledger import Epoch, Ledger, LedgerView, TransferRecord, VersionRecord, heard, read_report, through_outage
from .order import SENDER_GONE, Holder, Phase, TransferOrder, TransferReport, address_of, parts_of
from .reset import begin_again, offers_no_more
from .settings import SyncOptions, SyncSettings

__all__ = [
    "SENDER_GONE",
    "Epoch",
    "Holder",
    "Ledger",
    "LedgerView",
    "Phase",
    "SyncOptions",
    "SyncSettings",
    "TransferOrder",
    "TransferRecord",
    "TransferReport",
    "VersionRecord",
    "address_of",
    "begin_again",
    "heard",
    "offers_no_more",
    "parts_of",
    "read_report",
    "through_outage",
]
