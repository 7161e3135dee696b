"""The worker's part in weight sync: follow the ledger, join transfers, catch up from disk or a peer."""

from .adapters import LOAD_S, AdapterFollower
from .follower import WeightFollower
from .orders import folder_order
from .peer import Peer
from .snapshots import Snapshots

__all__ = ["LOAD_S", "AdapterFollower", "Peer", "Snapshots", "WeightFollower", "folder_order"]
