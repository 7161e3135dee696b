"""A transfer without its bytes: the order and the report, the settings, and the ledger in Redis.

Few files: no torch, so everything that follows the ledger may import it.
"""

from .history import VersionRecord, newest_versions, one_version
from .ledger import Epoch, Ledger, heard, read_report, through_outage
from .order import SENDER_GONE, Phase, TransferOrder, TransferReport, VersionHolder, address_of, parts_of
from .reset import begin_again, offers_no_more
from .settings import SyncOptions, SyncSettings

__all__ = [
    "SENDER_GONE",
    "Epoch",
    "Ledger",
    "Phase",
    "SyncOptions",
    "SyncSettings",
    "TransferOrder",
    "TransferReport",
    "VersionHolder",
    "VersionRecord",
    "address_of",
    "begin_again",
    "heard",
    "newest_versions",
    "offers_no_more",
    "one_version",
    "parts_of",
    "read_report",
    "through_outage",
]
