"""Memory that a version is received into before it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ...messages.model import StagingPolicy

log = logging.getLogger(__name__)
ROTATING = 3
"""Buffers of a version that is loaded as it arrives. One is filled while another is loaded. The third evens out their
speeds."""
ALIGN = 512
MARGIN = 0.03
"""Share of a GPU's memory that "auto" leaves to the engine's activations."""


class Staging:
    """Buffers of one rank. They are kept from one update to the next, because to allocate while serving is slow.

    policy: "on" stages a whole version (as much memory as the weights), "off" never does on a GPU, and "auto" does if
    enough memory is free. In host memory a version is always staged.
    """

    def __init__(self, device: torch.device, policy: StagingPolicy) -> None:
        self.device = device
        self._policy = policy
        self._whole: torch.Tensor | None = None
        self._rotating: list[torch.Tensor] = []

    def whole(self, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """Return buffers for all buckets, or None if there is no room; with "on" raises torch.OutOfMemoryError."""
        places, total = [], 0
        for size in sizes:
            places.append(total)
            total += -(-size // ALIGN) * ALIGN
        if self._whole is None or self._whole.numel() < total:
            self._whole = None
            if self.device.type == "cuda" and not self._affordable(total):
                return None
            try:
                self._whole = torch.empty(max(1, total), dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                if self._policy == "on":
                    raise
                return None
        flat = self._whole
        return [flat[place : place + size] for place, size in zip(places, sizes, strict=True)]

    def rotating(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return ROTATING buffers, each as large as the largest bucket."""
        most = max(sizes, default=0)
        if not self._rotating or self._rotating[0].numel() < most:
            self._rotating = []
            self._rotating = [torch.empty(most, dtype=torch.uint8, device=self.device) for _ in range(ROTATING)]
        return self._rotating

    def release(self) -> None:
        """Free the memory. It is allocated again when it is next needed."""
        self._whole, self._rotating = None, []

    def _affordable(self, total: int) -> bool:
        if self._policy != "auto":
            return self._policy == "on"
        free, memory = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        enough: bool = free - total > MARGIN * memory
        if not enough:
            log.info(
                "%d bytes to stage a version are not free (%d are); updates are received while loading", total, free
            )
        return enough
