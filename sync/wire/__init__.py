"""Connections between who has a version and who takes it: bucket by bucket, by broadcast in a cell, by CUDA IPC.

A receiver joins at the sender (`Lines`, `Hub` in sync/publish), which says from whom to take the version (`RelayTree`).
"""

from .brief import Brief, layout_of
from .frames import ANSWER, REFUSE, WAIT, Map, Talk
from .group import (
    MARGIN_S,
    Group,
    Queued,
    await_broadcasts,
    check_unbroken,
    nccl_environment,
    nccl_settings,
    open_group,
)
from .ipc import export_handles, gpu_id, open_handles
from .lines import Lines, Place
from .pull import Pull, fetch_manifest
from .quiet import quiet_torch
from .relay_tree import RelayTree
from .shelf import Offer, Shelf
from .store import (
    SLICE_S,
    await_key,
    begin,
    broadcast_key,
    join_store,
    local_end,
    own_address_towards,
    serve_store,
)

__all__ = [
    "ANSWER",
    "MARGIN_S",
    "REFUSE",
    "SLICE_S",
    "WAIT",
    "Brief",
    "Group",
    "Lines",
    "Map",
    "Offer",
    "Place",
    "Pull",
    "Queued",
    "RelayTree",
    "Shelf",
    "Talk",
    "await_broadcasts",
    "await_key",
    "begin",
    "broadcast_key",
    "check_unbroken",
    "export_handles",
    "fetch_manifest",
    "gpu_id",
    "join_store",
    "layout_of",
    "local_end",
    "nccl_environment",
    "nccl_settings",
    "open_group",
    "open_handles",
    "own_address_towards",
    "quiet_torch",
    "serve_store",
]
