"""LoRA adapters: the format that is accepted, reading one from a folder, and how one comes to a worker."""

from . import format
from .folder import read_adapter
from .format import Adapter
from .transfer import Fetch

__all__ = ["Adapter", "Fetch", "format", "read_adapter"]
