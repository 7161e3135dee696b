"""A trainer's buckets in another process on the same GPU: handed over as CUDA IPC handles, without a copy.

torch pickles such handles. Here they travel as plain values, so nothing that arrives is unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import torch

from ...messages.errors import MalformedMessage

_FIELDS = 8


def gpu_id(device: torch.device) -> str:
    """Return an id that no other GPU has, on any host; "" for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def export_handles(buckets: Sequence[torch.Tensor]) -> bytes:
    """Return handles of flat uint8 tensors on one GPU. The tensors must live until the receivers have reported.

    torch keeps the memory of an exported tensor until a receiver has counted down, so for ever if the receiver dies or
    never opens it. The transfer itself keeps the tensors as long as they are needed. So torch's count is set back to
    zero at once. Receivers do not get the counter's address, because below zero torch would keep the memory too.
    """
    torch.cuda.current_stream(buckets[0].device).synchronize()
    handles = []
    for bucket in buckets:
        storage: Any = bucket.untyped_storage()
        shared = storage._share_cuda_()
        torch.UntypedStorage._release_ipc_counter(*shared[4:6], device=bucket.device)
        # device, handle, storage size, storage offset, ref counter handle and offset, event handle, event sync required
        handles.append([[*shared[:4], b"", 0, *shared[6:]], bucket.storage_offset(), bucket.numel()])
    packed: bytes = msgpack.packb(handles, use_bin_type=True)
    return packed


def open_handles(raw: bytes, device: torch.device, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the sender's buckets, in its own memory: do not write to them. Raises MalformedMessage for other bytes."""
    try:
        handles = list(zip(msgpack.unpackb(raw), sizes, strict=True))
        buckets = []
        for (shared, offset, size), expected in handles:
            if size != expected or len(shared) != _FIELDS:
                raise ValueError(f"a bucket of {size} bytes where the manifest has {expected}")
            _, *rest = shared
            storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
            bucket = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, offset, (size,))
            buckets.append(bucket)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"CUDA IPC handles cannot be read: {error}") from None
    return buckets
