"""One engine rank's side of a transfer: receive a version, check it, load it, and offer it to others."""

from .compatibility import TIED, check_names
from .from_disk import open_version
from .lend import held_tensors
from .pulling import asks, take
from .receiver import Receiver
from .verify import Arrival

__all__ = ["TIED", "Arrival", "Receiver", "asks", "check_names", "held_tensors", "open_version", "take"]
