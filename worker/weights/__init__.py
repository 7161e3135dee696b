"""The worker's part in weight sync.

A worker takes part in the transfers that it hears of (`follower`). One that comes late, or is behind, takes the
committed version by itself (`catch_up`): from a snapshot on disk, or from whoever has it.
"""

from .follower import WeightFollower
from .snapshots import Snapshots, folder_order

__all__ = ["Snapshots", "WeightFollower", "folder_order"]
