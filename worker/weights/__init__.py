"""The worker's part in weight sync: follow the ledger, join transfers, catch up from disk or a peer."""

from .adapter_follower import LOAD_S, AdapterFollower
from .follower import WeightFollower
from .peer import Peer
from .snapshots import Snapshots, folder_order

__all__ = ["LOAD_S", "AdapterFollower", "Peer", "Snapshots", "WeightFollower", "folder_order"]
