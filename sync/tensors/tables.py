"""Tables that tell a GPU kernel of this package which block of which tensor each of its programs takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALIGN, WORD = 16, 4
"""Bytes: where a tensor must begin for loads of 16 bytes, and what kernels read at a time."""


def blocks_of(counts: torch.Tensor) -> torch.Tensor:
    """counts: (n,) int64, blocks of each row. Returns (sum,) int64: row * 2^32 + number of the block in its row."""
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return row << 32 | torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]


class Table:
    """int64 tables of a kernel in one piece of memory on its device, copied there without waiting for it."""

    def __init__(self, device: torch.device, parts: Sequence[torch.Tensor]) -> None:
        flat = torch.cat([part.reshape(-1) for part in parts])
        self._ready: Any = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                flat = flat.pin_memory().to(device, non_blocking=True)
                self._ready = torch.cuda.current_stream().record_event()
        self._flat = flat
        self.parts = flat.split([part.numel() for part in parts])

    def use(self, *others: torch.Tensor) -> None:
        """Before a launch on the current stream of a GPU: the table was made on another one perhaps, and may be freed,
        as `others` may, before the kernel is through with it."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._ready)
        for mine in (self._flat, *others):
            mine.record_stream(stream)
