"""LoRA adapters: the format that is accepted, reading one from a folder, and how one comes to a worker."""

from . import format
from .folder import read_adapter
from .format import PINNED, Adapter
from .transfer import receive_adapter

__all__ = ["PINNED", "Adapter", "format", "read_adapter", "receive_adapter"]
