"""Connections between a sender and its receivers: the rendezvous store, the process group, CUDA IPC."""

from .brief import Told, group_for, is_group_for
from .broadcaster import Broadcaster
from .group import MARGIN_S, Group, Queued, check_unbroken, nccl_environment, open_group, settle
from .ipc import gpu_id, open_handles
from .line import Wire
from .rendezvous import (
    SLICE_S,
    EpochKeys,
    await_key,
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
    "Broadcaster",
    "EpochKeys",
    "Group",
    "Queued",
    "Told",
    "Wire",
    "await_key",
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
    "settle",
    "why_broken",
]
