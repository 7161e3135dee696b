"""Tables that tell a GPU kernel of this package which block of which tensor each of its programs takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ALIGN, WORD = 16, 4
"""Bytes: a tensor must begin at a multiple of ALIGN for loads of 16 bytes, and kernels read WORD at a time."""


def blocks_of(counts: torch.Tensor) -> torch.Tensor:
    """Number the blocks of each row. counts: (n,) int64, blocks per row.

    Returns (sum of counts,) int64: row * 2^32 + number of the block in its row.
    """
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return row << 32 | torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]


class Table:
    """A kernel's int64 tables in one piece of memory on its device. The host does not wait for the copy to it."""

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
        """Call it before a launch on the current stream of a GPU.

        The table may have been made on another stream, so this one waits for it. The table and `others` may be freed
        before the kernel is done, so their memory is kept until then.
        """
        stream = torch.cuda.current_stream()
        stream.wait_event(self._ready)
        for mine in (self._flat, *others):
            mine.record_stream(stream)
