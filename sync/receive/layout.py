"""What is worked out once for a layout of buckets, and used again by every update that has it.

Per bucket an update then queues three calls: a digest of what arrived, a grouped copy, a digest of the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from ...messages.errors import DigestMismatch
from ...messages.model import WeightManifest
from ..plan import Bound, CopyPlan, PlanImpossible
from ..tensors import Digester, digests, hex_of, unpack

log = logging.getLogger(__name__)
TIED = frozenset({"lm_head.weight"})
"""Tensors that a model with tied embeddings holds under another name."""
Shape = tuple[int, ...]


class Model(Protocol):
    """What a version is loaded into: SGLang's model.

    One that also has a torch module's `named_parameters` can be read back, and loaded by recorded copies.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any: ...


@cache
def checkpoint_shapes(model: str) -> Mapping[str, Shape]:
    """Shapes of the tensors in a local safetensors checkpoint, by name; none if there is none to look at."""
    shapes: dict[str, Shape] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 – it is no mapping
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def check_names(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """Refuse tensors that are not the model's. Tied embeddings may come with their second name or without.

    SGLang only logs a name that it does not know, keeps the old weights of one that is not sent, and breaks off half
    way at one that does not fit. Raises DigestMismatch, which names the tensors.
    """
    strange, missing = sent.keys() - expected.keys() - TIED, expected.keys() - sent.keys() - TIED
    if strange or missing:
        what = [f"{kind} {sorted(names)[:3]}" for kind, names in (("unknown", strange), ("missing", missing)) if names]
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")
    for name, shape in sent.items():
        if expected.get(name, shape) != shape:
            raise DigestMismatch(f"tensor {name}: shape {shape}, the model's is {expected[name]}")


def bucket_views(manifest: WeightManifest, buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor for each bucket of the manifest: where it is, or will be when its turn has come."""
    return [buckets[index % len(buckets)][:size] for index, size in enumerate(manifest.bucket_nbytes)]


class Arrival:
    """Checks of what arrives in buckets that stay at their addresses."""

    def __init__(self, manifest: WeightManifest, buckets: Sequence[torch.Tensor]) -> None:
        """buckets: one for every bucket of the manifest; several may be the same memory, used in turn."""
        self.buckets = list(buckets)
        self.views = list(unpack(manifest, self.buckets))
        count, device = len(self.views), buckets[0].device if buckets else torch.device("cpu")
        self._found = torch.zeros(count, dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros(count, dtype=torch.int32, device=device)
        self._ranges = _ranges([spec.bucket for spec, _ in self.views], len(buckets))
        self._digesters = [
            Digester([tensor for _, tensor in self.views[first:last]]) if last > first else None
            for first, last in self._ranges
        ]

    def queue(self, bucket: int) -> None:
        """Look at a bucket that is there, on the current stream."""
        first, last = self._ranges[bucket]
        digester = self._digesters[bucket]
        if digester is not None:
            digester.run(self._found[first:last], self._nonfinite[first:last])

    def check(self, expected: torch.Tensor, *, finite: bool) -> None:
        """Wait for what was queued and compare. Raises DigestMismatch with the first wrong tensor's name.

        expected: (tensors,) int64 on the CPU, the version's digests.
        """
        wrong = (self._found.cpu() != expected).nonzero().flatten()
        if len(wrong):
            index = int(wrong[0])
            arrived, sent = (hex_of(values[index : index + 1])[0] for values in (self._found, expected))
            name = self.views[index][0].name
            raise DigestMismatch(f"tensor {name}: digest {arrived}, the trainer sent {sent}{_more(wrong)}")
        if finite and len(bad := self._nonfinite.cpu().nonzero().flatten()):
            raise DigestMismatch(f"tensor {self.views[int(bad[0])][0].name}: has NaN or Inf in it{_more(bad)}")


def _more(indices: torch.Tensor) -> str:
    return f" (and {len(indices) - 1} more tensors)" if len(indices) > 1 else ""


def _ranges(buckets: list[int], count: int) -> list[tuple[int, int]]:
    """[first, last) of each bucket's tensors, which follow one another in the manifest."""
    ranges, place = [], 0
    for bucket in range(count):
        first = place
        while place < len(buckets) and buckets[place] == bucket:
            place += 1
        ranges.append((first, place))
    if place != len(buckets):
        raise DigestMismatch("the manifest's tensors are not in the order of their buckets")
    return ranges


class Loading:
    """From buckets into the model: by the recorded copies, or by `load_weights` where they cannot be recorded."""

    def __init__(self, model: Model, plan: CopyPlan | None, arrival: Arrival) -> None:
        """plan: see `plan_for`. arrival: of the buckets to load from."""
        self._model = model
        self._by_bucket: list[list[tuple[str, torch.Tensor]]] = [[] for _ in arrival.buckets]
        for spec, view in arrival.views:
            self._by_bucket[spec.bucket].append((spec.name, view))
        self._bounds = plan.for_layout(arrival.buckets) if plan is not None else None
        self._readback = _Readback(self._bounds, arrival) if self._bounds is not None else None

    @property
    def readback(self) -> bool:
        """Whether what the parameters hold can be compared."""
        return self._readback is not None

    @property
    def compares_all(self) -> bool:
        """Whether every tensor that arrives is compared in the parameters, by its own digest."""
        return self._readback is not None and self._readback.all_whole

    def load(self, bucket: int, *, beside_wire: bool = False) -> None:
        """Queue the copies of one bucket on the current stream. beside_wire: others are on their way meanwhile."""
        if self._bounds is None:
            self._model.load_weights(self._by_bucket[bucket])
        else:
            self._bounds[bucket].run(beside_wire=beside_wire)

    def load_all(self, expected: torch.Tensor | None) -> None:
        """Queue the copies of every bucket; unless `expected` is None compare as `check` does, which waits for them."""
        for bucket in range(len(self._by_bucket)):
            self.load(bucket)
            if expected is not None:
                self.queue_readback(bucket)
        if expected is not None:
            self.check(expected)

    def queue_readback(self, bucket: int, *, count: bool = False) -> None:
        """Queue the digests of what the parameters hold of one bucket; its memory must still be as it was loaded.

        count: NaN and Inf, too.
        """
        if self._readback is not None:
            self._readback.queue(bucket, count)

    def check(self, expected: torch.Tensor, *, finite: bool = False) -> None:
        """Wait for what was queued and compare. Raises DigestMismatch with the first wrong tensor's name.

        expected: (tensors,) int64 on the CPU, the version's digests. finite: whether NaN and Inf are wrong, too; for
        arrivals that nobody looked at.
        """
        if self._readback is not None:
            self._readback.check(expected, finite=finite)


class _Readback:
    """Digests over the engine's parameters, bucket by bucket."""

    def __init__(self, bounds: Sequence[Bound], arrival: Arrival) -> None:
        index = {spec.name: number for number, (spec, _) in enumerate(arrival.views)}
        whole = [(name, view) for bound in bounds for name, view in bound.whole]
        self._names = [name for name, _ in whole]
        self._order = torch.tensor([index[name] for name in self._names], dtype=torch.int64)
        device = whole[0][1].device if whole else torch.device("cpu")
        self._found = torch.zeros(len(whole), dtype=torch.int64, device=device)
        self._nonfinite = torch.zeros(len(whole), dtype=torch.int32, device=device)
        pinned = device.type == "cuda"
        self._fetched = torch.zeros(len(whole), dtype=torch.int64, pin_memory=pinned)
        self._fetched_nonfinite = torch.zeros(len(whole), dtype=torch.int32, pin_memory=pinned)
        self._there: Any = None
        self._digesters: list[tuple[Digester, torch.Tensor, torch.Tensor] | None] = []
        place = 0
        for bound in bounds:
            views = [view for _, view in bound.whole]
            place, first = place + len(views), place
            rows = self._found[first:place], self._nonfinite[first:place]
            self._digesters.append((Digester(views), *rows) if views else None)
        # A slice has no digest in the manifest: it is compared with the slice that arrived, and was verified.
        self._partial = [list(bound.partial) for bound in bounds]
        self._slices: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.all_whole = len(set(self._names)) == len(arrival.views) and not any(self._partial)

    def queue(self, bucket: int, count: bool) -> None:
        mine = self._digesters[bucket]
        if mine is not None:
            mine[0].run(mine[1], mine[2] if count else None)
        if partial := self._partial[bucket]:
            held = digests([target for _, _, target in partial])
            came = digests([source.to(target.device, target.dtype).contiguous() for _, source, target in partial])
            self._slices.append((bucket, held, came))
        if bucket == len(self._digesters) - 1:  # the last one
            self._fetched.copy_(self._found, non_blocking=True)
            self._fetched_nonfinite.copy_(self._nonfinite, non_blocking=True)
            if self._found.is_cuda:
                self._there = torch.cuda.current_stream(self._found.device).record_event()

    def check(self, expected: torch.Tensor, *, finite: bool) -> None:
        slices, self._slices = self._slices, []
        if self._there is not None:
            self._there.synchronize()
        self._compare(self._names, self._fetched, expected[self._order])
        if finite and self._fetched_nonfinite.any():
            bad = self._fetched_nonfinite.nonzero().flatten()
            raise DigestMismatch(f"tensor {self._names[int(bad[0])]}: has NaN or Inf in it{_more(bad)}")
        for bucket, held, came in slices:
            self._compare([name for name, _, _ in self._partial[bucket]], held.cpu(), came.cpu())

    @staticmethod
    def _compare(names: Sequence[str], held: torch.Tensor, wanted: torch.Tensor) -> None:
        if torch.equal(held, wanted):
            return
        wrong = (held != wanted).nonzero().flatten()
        index = int(wrong[0])
        raise DigestMismatch(
            f"tensor {names[index]}: the engine holds {hex_of(held[index : index + 1])[0]} after the load, "
            f"not {hex_of(wanted[index : index + 1])[0]}{_more(wrong)}"
        )


def plan_for(model: Model, manifest: WeightManifest, known: frozenset[str], *, must: bool = False) -> CopyPlan | None:
    """The copies that loading this layout into `model` comes down to; None if they cannot be recorded.

    known: names that the model's checkpoint has, as far as that can be told; its loader may skip some of them.
    must: other tensors could be recorded with this model. If these cannot, they are not its own: none is written.
    Must run where nothing else uses the model, which stays as it is. Raises DigestMismatch if parameters would keep
    their old values or tensors would be ignored: SGLang only logs such names.
    """
    if not hasattr(model, "named_parameters"):
        return None
    try:
        plan = CopyPlan.trace(model, manifest.tensors)
    except PlanImpossible as reason:
        if must:
            raise DigestMismatch(f"not the tensors of this model: {reason}") from reason
        log.info("tensors are loaded one by one, and not read back: %s", reason)
        return None
    unused = sorted(set(plan.unused) - known - TIED)
    what = []
    if unused:
        what.append(f"unknown {unused[:3]}")
    if plan.missing:
        what.append(f"missing for {sorted(plan.missing)[:3]}")
    if what:
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")
    return plan
