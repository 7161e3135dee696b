"""Finds the elements of a parameter that a list of writes covers, and those that are written twice.

A write is a box in the parameter's index space. So 100,000 slices of a mixture of experts are compared by their corners
and not element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .trace import PlanImpossible, Write

Corners = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of one storage that an engine tensor covers without gaps.

    start, size: in elements. parameter: whether the tensor is a parameter, and not a buffer.
    """

    name: str
    tensor: torch.Tensor
    start: int
    size: int
    parameter: bool

    @property
    def bytes(self) -> tuple[int, int]:
        """[first, last) byte in the storage."""
        width = self.tensor.element_size()
        return self.start * width, (self.start + self.size) * width


@dataclass(frozen=True, slots=True)
class Settled:
    """Writes that do not overlap, so that their order does not matter.

    kept: the writes to do. Constant fills are cut to the elements that no copy writes. superseded: copies that a later
    one overwrites whole. covered: whether every element is written.
    """

    kept: list[Write]
    superseded: list[Write]
    covered: bool


def settle(region: Region, writes: Sequence[Write]) -> Settled:
    """Resolve overlaps between writes. Raises PlanImpossible for a copy that overlaps another in part, or is no box."""
    for write in writes:
        if write.destination.element_size() != region.tensor.element_size():
            raise PlanImpossible(f"{write.name} is written into {region.name} as {write.destination.dtype}")
    canvas: list[tuple[int, int]] = [(region.size, 1)]
    boxes = [_box(write.destination, region.start, canvas) for write in writes]
    if any(box is None for box in boxes):
        canvas = _dimensions(region.tensor)
        boxes = [_box(write.destination, region.start, canvas) for write in writes]
    corners = np.empty((len(writes), 2, len(canvas)), dtype=np.int64)
    for index, box in enumerate(boxes):
        if box is None:
            raise PlanImpossible(f"{writes[index].name} is written into {region.name} with gaps")
        corners[index] = box
    return _settle(region, canvas, list(writes), corners)


def _settle(region: Region, canvas: list[tuple[int, int]], writes: list[Write], corners: Corners) -> Settled:
    kept: list[Write] = []
    superseded: list[Write] = []
    volume = 0
    for cluster in _clusters(canvas, corners):
        for place, index in enumerate(cluster):
            write, (low, high) = writes[index], corners[index]
            later = corners[cluster[place + 1 :]]
            meets = later[np.all((later[:, 0] < high) & (later[:, 1] > low), axis=1)]
            if write.source is None:
                for piece in _subtract(corners[index], meets):
                    kept.append(Write(write.name, None, write.value, _view(region, canvas, piece)))
                    volume += int(np.prod(piece[1] - piece[0]))
            elif np.any(np.all((meets[:, 0] <= low) & (meets[:, 1] >= high), axis=1)):
                superseded.append(write)
            elif len(meets):
                raise PlanImpossible(f"{write.name} in {region.name} is overwritten in part")
            else:
                kept.append(write)
                volume += int(np.prod(high - low))
    return Settled(kept, superseded, volume == region.size)


def _clusters(canvas: list[tuple[int, int]], corners: Corners) -> list[npt.NDArray[np.intp]]:
    """Group the boxes whose stretches of memory overlap. Each group has the boxes' numbers, in order."""
    if not len(corners):
        return []
    strides = np.array([stride for _, stride in canvas], dtype=np.int64)
    first, last = corners[:, 0] @ strides, (corners[:, 1] - 1) @ strides
    order = np.argsort(first, kind="stable")
    apart = first[order][1:] > np.maximum.accumulate(last[order])[:-1]
    return [np.sort(cluster) for cluster in np.split(order, np.flatnonzero(apart) + 1)]


def _dimensions(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return (extent, stride) of the dimensions with more than one element, largest stride first."""
    dims = [(extent, stride) for extent, stride in zip(tensor.shape, tensor.stride(), strict=True) if extent > 1]
    return sorted(dims, key=lambda dim: -dim[1]) or [(1, 1)]


def _runs(view: torch.Tensor) -> list[tuple[int, int]]:
    """Return (count, stride), smallest stride first. Dimensions that continue one another are merged."""
    runs: list[tuple[int, int]] = []
    for extent, stride in reversed(_dimensions(view)):
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    return runs


def _box(view: torch.Tensor, start: int, canvas: list[tuple[int, int]]) -> Corners | None:
    """Return [lower corner, upper corner) of `view` on a dense `canvas` that begins at element `start`."""
    place = view.storage_offset() - start
    low, extents = [], [1] * len(canvas)
    for _, stride in canvas:
        low.append(place // stride)
        place %= stride
    at = {stride: index for index, (_, stride) in enumerate(canvas)}
    for count, step in _runs(view):
        left, stride = count, step
        while left > 1:
            index = at.get(stride)
            if index is None or extents[index] != 1:
                return None
            extent = canvas[index][0]
            if low[index] + left <= extent:
                extents[index], left = left, 1
            elif low[index] == 0 and left % extent == 0:  # fills this dimension and goes on into the next
                extents[index], left, stride = extent, left // extent, stride * extent
            else:
                return None
    box = np.array([low, low], dtype=np.int64)
    box[1] += extents
    return box


def _subtract(box: Corners, others: Corners) -> list[Corners]:
    """Return the rest of `box` without `others`, as boxes that do not overlap."""
    pieces = [box]
    for other in others:
        rest: list[Corners] = []
        for piece in pieces:
            if np.any(other[0] >= piece[1]) or np.any(other[1] <= piece[0]):
                rest.append(piece)
                continue
            inner = piece.copy()
            for axis in range(box.shape[1]):
                for side, bound in ((0, max(inner[0, axis], other[0, axis])), (1, min(inner[1, axis], other[1, axis]))):
                    if bound != inner[side, axis]:
                        outside = inner.copy()
                        outside[1 - side, axis] = bound
                        rest.append(outside)
                        inner[side, axis] = bound
        pieces = rest
    return pieces


def _view(region: Region, canvas: list[tuple[int, int]], box: Corners) -> torch.Tensor:
    strides = [stride for _, stride in canvas]
    offset = region.start + sum(int(low) * stride for low, stride in zip(box[0], strides, strict=True))
    return region.tensor.detach().as_strided([int(n) for n in box[1] - box[0]], strides, offset)


def is_dense(view: torch.Tensor) -> bool:
    """Whether `view` covers one stretch of memory without gaps or repeats, whatever the order of its dimensions."""
    runs = _runs(view)
    return len(runs) == 1 and runs[0][1] == 1
