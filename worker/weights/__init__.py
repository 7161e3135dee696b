"""The worker's part in weight sync: follow the ledger, join transfers, catch up from disk or a peer."""

from .adapters import LOAD_S, AdapterFollower
from .follower import WeightFollower
from .peer import Peer
from .snapshots import SLOWEST, TIMEOUT_S, Snapshots

__all__ = ["LOAD_S", "SLOWEST", "TIMEOUT_S", "AdapterFollower", "Peer", "Snapshots", "WeightFollower"]
