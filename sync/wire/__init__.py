"""Connections between a sender of weights and its receivers: rendezvous store, process group, CUDA IPC."""

from .brief import Brief, group_for, is_group_for
from .broadcaster import Broadcaster
from .group import MARGIN_S, Group, Queued, await_broadcasts, check_unbroken, nccl_environment, open_group
from .ipc import gpu_id, open_handles
from .sender_connection import SenderConnection
from .store import (
    SLICE_S,
    EpochKeys,
    await_key,
    begin,
    fetch,
    fetch_brief,
    fetch_manifest,
    join_store,
    local_end,
    own_address_towards,
    serve_store,
    why_broken,
)

__all__ = [
    "MARGIN_S",
    "SLICE_S",
    "Brief",
    "Broadcaster",
    "EpochKeys",
    "Group",
    "Queued",
    "SenderConnection",
    "await_broadcasts",
    "await_key",
    "begin",
    "check_unbroken",
    "fetch",
    "fetch_brief",
    "fetch_manifest",
    "gpu_id",
    "group_for",
    "is_group_for",
    "join_store",
    "local_end",
    "nccl_environment",
    "open_group",
    "open_handles",
    "own_address_towards",
    "serve_store",
    "why_broken",
]
