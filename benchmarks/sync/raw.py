"""The rate of bare broadcasts: the same number of bytes in large buffers, and nothing else."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from rolloutmq.sync.wire import Group, Queued, join_store, open_group

from .child import now
from .figures import Span

BUFFERS = 2


class Raw:
    """One rank of a group for bare broadcasts. It blocks, so use it in a thread."""

    def __init__(
        self,
        name: str,
        *,
        rank: int,
        world: int,
        host: str,
        port: int,
        device: str,
        timeout_s: float,
        store: Any = None,
    ) -> None:
        """store: the trainer's own; receivers connect to host:port. Raises TransferTimeout."""
        self._device = torch.device(device)
        deadline = time.monotonic() + timeout_s
        store = store if store is not None else join_store(host, port, timeout_s)
        self._group: Group = open_group(
            store, name, rank=rank, world=world, host=host, device=self._device, deadline=deadline
        )
        self._buffers: list[torch.Tensor] = []

    def run(self, nbytes: int, bucket_bytes: int, timeout_s: float) -> Span:
        """Broadcast `nbytes` in buffers of `bucket_bytes`, used in turn. Returns start and end on this rank."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return self._run(nbytes, bucket_bytes, timeout_s)

    def _run(self, nbytes: int, bucket_bytes: int, timeout_s: float) -> Span:
        deadline = time.monotonic() + timeout_s
        if not self._buffers or self._buffers[0].numel() != bucket_bytes:
            self._buffers = []
            count = BUFFERS if nbytes > bucket_bytes else 1
            self._buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        # All ranks begin together, once all have allocated.
        self._wait(self._group.broadcast(self._buffers[0][:1], deadline))
        began, left, turn = now(), nbytes, 0
        queued: Queued | None = None
        while left > 0:
            size = min(left, bucket_bytes)
            queued = self._group.broadcast(self._buffers[turn % len(self._buffers)][:size], deadline)
            left -= size
            turn += 1
        self._wait(queued)  # broadcasts end in their order
        return began, now()

    def free(self) -> None:
        """Give the buffers' memory back to the device."""
        self._buffers = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self, queued: Queued | None) -> None:
        """Wait exactly until the device is done. A wait that polls would make the wire look slower.

        If a peer is gone, the parent's deadline ends it.
        """
        if self._device.type == "cuda" and queued is not None:
            queued.wait()
            torch.cuda.synchronize(self._device)
