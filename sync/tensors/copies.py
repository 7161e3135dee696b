"""Copies many tensors at once, each in the way that is fastest for its size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .tables import ALIGN, WORD

if TYPE_CHECKING:
    from .copies_cuda import Launch

LARGE_BYTES = 1 << 20
"""From this size on a plain copy of its own is faster on a GPU than a share in a grouped one (H200: 3.7 against 2.8
TB/s read and written). Below it, the launch costs more than the copy."""


class Copies:
    """Source -> target pairs of the same shape, prepared once for fixed addresses."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, often: bool = False) -> None:
        """pairs: (target, source) on any devices, of any dtypes that torch copies between.

        often: they run again and again, so it is worth making tables for this package's kernel.
        """
        self._single: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        launched: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for target, source in pairs:
            # torch makes one kernel of a call if all tensors in it are alike, else one kernel for each tensor.
            alike = _alike(target, source)
            if often and target.is_cuda and fits(target, source):
                launched.setdefault(target.device, []).append((target, source))
            elif alike and source.nbytes < LARGE_BYTES:
                targets, sources = groups.setdefault((target.dtype, target.device), ([], []))
                targets.append(target)
                sources.append(source)
            else:
                self._single.append((target, source))
        self._groups = list(groups.values())
        self._launches = [_launch(those) for those in launched.values()]

    def run(self, *, beside_wire: bool = False) -> None:
        """Queue the copies on the current stream. If both sides are on one device, the host does not wait.

        beside_wire: NCCL receives meanwhile, so this package's kernel takes only a part of the GPU.
        """
        for launch in self._launches:
            launch.run(beside_wire=beside_wire)
        with torch.no_grad():
            for target, source in self._single:
                target.copy_(source, non_blocking=target.is_cuda)
            for targets, sources in self._groups:
                torch._foreach_copy_(targets, sources)


def _alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether both have the same dtype and layout and are on one device, so that a copy moves bytes in order."""
    same: bool = source.dtype == target.dtype and source.device == target.device
    return same and source.is_contiguous() and target.is_contiguous()


def fits(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the kernel can copy a pair: the same bytes in the same order, whole words, at multiples of 16."""
    aligned: bool = source.data_ptr() % ALIGN == 0 and target.data_ptr() % ALIGN == 0
    return _alike(target, source) and aligned and source.nbytes % WORD == 0


def _launch(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Launch:
    from .copies_cuda import Launch  # noqa: PLC0415 – a trainer or a worker without a GPU has no Triton

    return Launch(pairs)
