"""The copy plan: what SGLang's `load_weights` does with one layout of tensors, recorded once and replayed in few calls.

`CopyPlan.trace` records it (see trace.py). `CopyPlan.for_layout` applies it to given buckets. `Bound.run` does it.
docs/architecture.md says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...messages.errors import InvalidField
from ...messages.model import TensorSpec
from ..tensors import Copies, dtype_named
from .boxes import settle
from .engine import EngineTensors
from .trace import PlanImpossible, Recorder, Source, Write


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from a view of the checkpoint tensor `name` into a view of an engine tensor, both of one shape.

    whole: the destination is contiguous and has every byte of the tensor in its order. So both have one digest.
    """

    name: str
    source: Source
    destination: torch.Tensor
    whole: bool


class Bound:
    """The copies of some tensors, bound to sources at fixed addresses. Valid as long as the sources stay there.

    whole: (name, destination) of copies whose destination must have the checkpoint tensor's digest.
    partial: (name, source, destination) of slices and conversions. The destination must have the digest of the source
        in the destination's dtype.
    """

    def __init__(self, copies: Sequence[tuple[Copy, torch.Tensor]], fills: Sequence[Write]) -> None:
        self.whole = [(copy.name, copy.destination) for copy, _ in copies if copy.whole]
        self.partial = [(copy.name, source, copy.destination) for copy, source in copies if not copy.whole]
        self._fills = [(fill.destination, fill.value) for fill in fills]
        self._copies = Copies([(copy.destination, source) for copy, source in copies], often=True)

    def run(self, *, beside_wire: bool = False) -> None:
        """Queue the copies on the current stream. If both sides are on one device, the host does not wait.

        beside_wire: see `Copies.run`.
        """
        with torch.no_grad():
            for target, value in self._fills:
                target.fill_(value)
        self._copies.run(beside_wire=beside_wire)


@dataclass(eq=False, slots=True)
class CopyPlan:
    """What `load_weights` does with one layout of tensors on this rank.

    specs: the tensors, by checkpoint name. unused: names of tensors that are copied nowhere.
    copies: by checkpoint name. No two of them write the same element, so their order does not matter.
    superseded: copies that a later one overwrites whole (tied embeddings sent under both names). They are not done.
    fills: writes of a constant. missing: names of parameters with elements that no copy or fill writes.
    """

    specs: Mapping[str, TensorSpec]
    unused: Sequence[str]
    copies: Mapping[str, Sequence[Copy]]
    superseded: Mapping[str, Sequence[Copy]]
    fills: Sequence[Write]
    missing: Sequence[str]

    @classmethod
    def trace(cls, model: Any, specs: Sequence[TensorSpec]) -> CopyPlan:
        """Record what the model's `load_weights` does with tensors of these names, dtypes and shapes.

        No bit of the model's parameters and buffers changes. Nothing else may use the model meanwhile. Copies that a
        loader makes in threads of its own are not seen. Raises PlanImpossible if the loader does more than copying, or
        fails, and InvalidField for a dtype that torch does not know, or a repeated name.
        """
        layout = {spec.name: (_dtype(spec), spec.shape) for spec in specs}
        if len(layout) != len(specs):
            raise InvalidField("tensors", [spec.name for spec in specs], "every name once")
        engine = EngineTensors(model)
        recorder = Recorder(engine.names)
        with engine.kept():
            recorder.load(model.load_weights, layout)
        copies: dict[str, list[Copy]] = {}
        superseded: dict[str, list[Copy]] = {}
        fills: list[Write] = []
        missing: list[str] = []
        for region, writes in engine.sorted(recorder.writes):
            settled = settle(region, writes)
            if not settled.covered and region.parameter:
                missing.append(region.name)
            for some, found in ((settled.kept, copies), (settled.superseded, superseded)):
                for write in some:
                    if write.source is None:
                        fills.append(write)
                    else:
                        found.setdefault(write.name, []).append(_copy(write, write.source, layout[write.name]))
        unused = [name for name in layout if name not in recorder.used]
        return cls({spec.name: spec for spec in specs}, unused, copies, superseded, fills, missing)

    def for_layout(self, buckets: Sequence[torch.Tensor]) -> list[Bound]:
        """Return the copies from flat uint8 buckets, one Bound per bucket. Valid as long as the buckets stay in place.

        buckets: each at least as long as the layout's. Several may be the same memory, used in turn.
        Raises InvalidField for a tensor that does not fit.
        """
        copies: list[list[tuple[Copy, torch.Tensor]]] = [[] for _ in buckets]
        names: list[list[str]] = [[] for _ in buckets]
        typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        for spec in self.specs.values():
            size = buckets[spec.bucket].numel() if spec.bucket < len(buckets) else -1
            if spec.offset + spec.nbytes > size or spec.offset % _dtype(spec).itemsize:
                raise InvalidField(spec.name, f"{spec.nbytes} bytes at {spec.offset}", f"aligned, inside {size} bytes")
            names[spec.bucket].append(spec.name)
            for copy in self.copies.get(spec.name, ()):
                at = copy.source
                key = (spec.bucket, at.dtype)
                if key not in typed:
                    bucket = buckets[spec.bucket]
                    typed[key] = bucket[: size - size % at.dtype.itemsize].view(at.dtype)
                base = typed[key]
                offset = base.storage_offset() + spec.offset // at.dtype.itemsize + at.offset
                copies[spec.bucket].append((copy, base.as_strided(at.shape, at.stride, offset)))
        return [Bound(some, self._fills_of(those)) for some, those in zip(copies, names, strict=True)]

    def export(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint as the engine holds it: name -> view of a parameter. Unused names are left out.

        Raises PlanImpossible for a tensor that is not here whole, because it was cut for tensor parallelism or
        converted.
        """
        views: dict[str, torch.Tensor] = {}
        unused = set(self.unused)
        for name, spec in self.specs.items():
            if name in unused:
                continue
            candidates = [*self.copies.get(name, ()), *self.superseded.get(name, ())]
            whole = next((copy for copy in candidates if copy.whole), None)
            if whole is None and torch.Size(spec.shape).numel():
                raise PlanImpossible(f"the engine does not hold {name} whole and as it was sent")
            held = torch.empty(0) if whole is None else whole.destination
            views[name] = held.view(-1).view(_dtype(spec)).view(spec.shape)
        return views

    def _fills_of(self, names: Iterable[str]) -> list[Write]:
        wanted = set(names)
        return [fill for fill in self.fills if fill.name in wanted]


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = dtype_named(spec.dtype)
    if dtype is None:
        raise InvalidField(f"{spec.name}.dtype", spec.dtype, "a torch dtype")
    return dtype


def _copy(write: Write, source: Source, sent: tuple[torch.dtype, tuple[int, ...]]) -> Copy:
    target = write.destination
    nbytes = sent[0].itemsize * torch.Size(sent[1]).numel()
    whole = (
        source.dtype == target.dtype
        and target.numel() * target.element_size() == nbytes
        and source.contiguous
        and target.is_contiguous()
    )
    return Copy(write.name, source, target, whole)
