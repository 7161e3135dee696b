"""The worker's part in weight sync.

A late worker gets the newest version from the trainer (`follower`: it asks, and joins the transfer), from a snapshot on
disk (`catch_up`), or from another worker (`peer`, on the side that sends).
"""

from .adapter_follower import LOAD_S, AdapterFollower
from .follower import WeightFollower
from .peer import Peer
from .snapshots import Snapshots, folder_order

__all__ = ["LOAD_S", "AdapterFollower", "Peer", "Snapshots", "WeightFollower", "folder_order"]
