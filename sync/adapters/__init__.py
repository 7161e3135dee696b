"""LoRA adapters: the format that is accepted, reading one from a folder, and its transfer."""

from . import format
from .folder import read_adapter
from .format import Adapter
from .transfer import AdapterSender, Fetch, Parcel

__all__ = ["Adapter", "AdapterSender", "Fetch", "Parcel", "format", "read_adapter"]
