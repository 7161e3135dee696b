"""The tensors of an engine that a loader may write to, and their places in memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .boxes import Region, is_dense
from .trace import PlanImpossible, Write, storage_key


class EngineTensors:
    """Parameters and buffers of a model. names: storage key -> name; tied tensors have their first name."""

    def __init__(self, model: Any) -> None:
        """Raises PlanImpossible for parameters that are not plain memory, or that overlap."""
        self._model = model
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self.names: dict[int, str] = {}
        self._regions: dict[int, list[Region]] = {}
        for name, tensor in self._parameters.items():
            self._add(name, tensor, True)
        for name, tensor in model.named_buffers() if hasattr(model, "named_buffers") else ():
            self._add(name, tensor, False)

    def _add(self, name: str, tensor: torch.Tensor, parameter: bool) -> None:
        key = storage_key(name, tensor)
        self.names.setdefault(key, name)
        regions = self._regions.setdefault(key, [])
        region = Region(name, tensor, tensor.storage_offset(), tensor.numel(), parameter)
        if region.size == 0 or any(region.bytes == other.bytes for other in regions):
            return
        overlaps = any(region.bytes[0] < other.bytes[1] and other.bytes[0] < region.bytes[1] for other in regions)
        if is_dense(tensor) and not overlaps:
            regions.append(region)
        elif parameter:
            raise PlanImpossible(f"{name} does not have a stretch of memory for itself")

    def sorted(self, writes: Iterable[Write]) -> Iterator[tuple[Region, list[Write]]]:
        """Yield every region with its writes, in order. Raises PlanImpossible for a write outside all regions."""
        starts: dict[int, list[int]] = {}
        for key, regions in self._regions.items():
            regions.sort(key=lambda region: region.bytes[0])
            starts[key] = [region.bytes[0] for region in regions]
        found: dict[int, list[Write]] = {}
        for write in writes:
            target = write.destination
            key, place = storage_key(write.name, target), target.storage_offset() * target.element_size()
            index = bisect_right(starts[key], place) - 1
            if index < 0 or place >= self._regions[key][index].bytes[1]:
                raise PlanImpossible(f"{write.name} is written beside {self.names[key]}")
            found.setdefault(id(self._regions[key][index]), []).append(write)
        for regions in self._regions.values():
            for region in regions:
                yield region, found.get(id(region), [])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore every parameter at the end. Raises PlanImpossible if one had been replaced."""
        before = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            yield
        finally:
            replaced = [name for name, data in before.items() if self._restore(name, data)]
        if replaced:
            raise PlanImpossible(f"load_weights replaces {replaced[0]} instead of copying into it")

    def _restore(self, name: str, data: torch.Tensor) -> bool:
        parameter = self._parameters[name]
        path, _, leaf = name.rpartition(".")
        replaced = False
        if isinstance(self._model, torch.nn.Module):
            owner = self._model.get_submodule(path)
            if owner._parameters.get(leaf) is not parameter:
                owner.__dict__.pop(leaf, None)
                owner._parameters[leaf] = parameter
                replaced = True
        if not _same(parameter, data):
            parameter.data = data
            replaced = True
        return replaced


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and (
        one.storage_offset(),
        one.shape,
        one.stride(),
        one.dtype,
    ) == (other.storage_offset(), other.shape, other.stride(), other.dtype)
