"""The worker's part in weight sync.

A worker takes part in the transfers that it hears of (`follower`). One that comes late, or is behind, takes the
committed version by itself (`catch_up`): from a snapshot on disk, or from whoever has it.
"""

from .adapter_follower import LOAD_S, AdapterFollower
from .follower import WeightFollower
from .snapshots import Snapshots, folder_order

__all__ = ["LOAD_S", "AdapterFollower", "Snapshots", "WeightFollower", "folder_order"]
