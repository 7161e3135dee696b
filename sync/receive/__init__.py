"""One engine rank's side of a transfer: receive a version, check it, load it, and send it on to other workers."""

from .compatibility import TIED, check_names
from .from_disk import open_version
from .lend import held_tensors, send_held
from .receiver import Receiver

__all__ = ["TIED", "Receiver", "check_names", "held_tensors", "open_version", "send_held"]
