"""Loads received buckets into the model: by recorded copies, or by `load_weights` if those cannot be recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ...messages.errors import DigestMismatch
from ...messages.model import WeightManifest
from ..plan import CopyPlan, PlanImpossible
from ..tensors import dtype_named
from .compatibility import HEAD, TIED, Shape, check_dropped, check_dtype, is_tied, loses_nothing, twins_of
from .verify import Arrival, Readback

log = logging.getLogger(__name__)
Known = Mapping[str, tuple[str, Shape]]
"""Dtypes and shapes in the engine's checkpoint, by name; empty if they are not known."""


class Model(Protocol):
    """The model that a version is loaded into, as SGLang has it.

    If it has `named_parameters`, as torch modules do, it can be loaded by recorded copies and read back.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any: ...


class Loading:
    """Loads one layout of buckets into one model. It is made once, and used by every update with that layout."""

    def __init__(self, model: Model, plan: CopyPlan | None, arrival: Arrival, known: Known) -> None:
        """plan, known: see `plan_for`; without a plan `load_weights` is called. arrival: of the buckets to load from.

        Raises DigestMismatch for a tensor that the model has no use for.
        """
        self._model = model
        self._specs = [spec for spec, _ in arrival.views]
        self._dropped = twins_of(self._specs, _dropped(model, plan, arrival, known))
        self._by_bucket: list[list[tuple[str, torch.Tensor]]] = [[] for _ in arrival.buckets]
        for spec, view in arrival.views:
            self._by_bucket[spec.bucket].append((spec.name, view))
        self._bounds = plan.for_layout(arrival.buckets) if plan is not None else None
        self._readback = Readback(self._bounds, arrival) if self._bounds is not None else None

    @property
    def readback(self) -> bool:
        """Whether the parameters can be compared after the load."""
        return self._readback is not None

    @property
    def compares_all(self) -> bool:
        """Whether every tensor is compared in the parameters, by its own digest."""
        return self._readback is not None and self._readback.all_whole

    def check_dropped(self, digests: torch.Tensor) -> None:
        """Refuse a version of which the model drops a tensor that is not another one's twin. Raises DigestMismatch."""
        check_dropped(self._specs, self._dropped, digests)

    def load(self, bucket: int, *, beside_wire: bool = False) -> None:
        """Queue the copies of one bucket on the current stream. beside_wire: other buckets arrive meanwhile."""
        if self._bounds is None:
            self._model.load_weights(self._by_bucket[bucket])
        else:
            self._bounds[bucket].run(beside_wire=beside_wire)

    def load_all(self, expected: torch.Tensor | None, *, converted: bool = False) -> None:
        """Queue the copies of every bucket. Unless `expected` is None, wait for them and compare as `check` does."""
        for bucket in range(len(self._by_bucket)):
            self.load(bucket)
            if expected is not None:
                self.queue_readback(bucket)
        if expected is not None:
            self.check(expected, converted=converted)

    def queue_readback(self, bucket: int, *, count: bool = False) -> None:
        """Queue digests of the parameters that one bucket was loaded into. The bucket must not have changed since.

        count: count NaN and Inf, too.
        """
        if self._readback is not None:
            self._readback.queue(bucket, count)

    def check(self, expected: torch.Tensor, *, finite: bool = False, converted: bool = False) -> None:
        """Wait for the queued digests and compare them. Raises DigestMismatch with the first wrong tensor's name.

        expected: (tensors,) int64 on the CPU, the version's digests. finite: refuse NaN and Inf, too. Needed if the
        buckets were not looked at on arrival. converted: refuse those that a conversion has made.
        """
        if self._readback is not None:
            self._readback.check(expected, finite=finite, converted=converted)


def plan_for(model: Model, manifest: WeightManifest, known: Known, *, must: bool = False) -> CopyPlan | None:
    """Record the copies that load this layout into `model`. Returns None if they cannot be recorded.

    known: of the model's checkpoint. The model's loader may skip some of its tensors.
    must: whether another layout could be recorded with this model. If this one cannot, it is refused.

    Must run where nothing else uses the model, and does not change it. Raises DigestMismatch if a tensor would be
    ignored or converted with a loss, or a parameter would keep its old values: SGLang only logs such names.
    """
    if not hasattr(model, "named_parameters"):
        _check_without_plan(model, manifest, known)
        return None
    try:
        plan = CopyPlan.trace(model, manifest.tensors)
    except PlanImpossible as reason:
        if must:
            raise DigestMismatch(f"not the tensors of this model: {reason}") from reason
        _check_without_plan(model, manifest, known)
        log.info("tensors are loaded one by one, and not read back: %s", reason)
        return None
    unused = sorted(set(plan.unused) - known.keys() - TIED)
    what = []
    if unused:
        what.append(f"unknown {unused[:3]}")
    if plan.missing:
        what.append(f"missing for {sorted(plan.missing)[:3]}")
    if what:
        raise DigestMismatch(f"not the tensors of this model: {', '.join(what)}")
    for name, copies in plan.copies.items():
        for copy in copies:
            check_dtype(name, copy.source.dtype, copy.destination.dtype, known.get(name, ("",))[0])
    return plan


def _check_without_plan(model: Model, manifest: WeightManifest, known: Known) -> None:
    """Check what a plan would show: a missing head, and dtypes, which the engine's checkpoint or parameters tell."""
    parameters = dict(model.named_parameters()) if hasattr(model, "named_parameters") else {}
    sent = {spec.name for spec in manifest.tensors}
    if HEAD not in sent and HEAD in known.keys() | parameters.keys() and not is_tied(model):
        raise DigestMismatch(f"not the tensors of this model: missing ['{HEAD}']")
    floats = {parameter.dtype for parameter in parameters.values()}
    for spec in manifest.tensors:
        stored = known.get(spec.name, ("",))[0]
        held = {dtype_named(stored)} if stored else floats
        dtype = dtype_named(spec.dtype)
        if dtype is not None and held and not any(one is not None and loses_nothing(dtype, one) for one in held):
            check_dtype(spec.name, dtype, next(iter(held)), stored)


def _dropped(model: Model, plan: CopyPlan | None, arrival: Arrival, known: Known) -> list[str]:
    """Name the tensors that the model does not store because it is tied."""
    if plan is not None:
        heads = [name for name in plan.unused if name.endswith(HEAD)]
        return heads + [name for name in plan.superseded if name not in plan.copies]
    tied = is_tied(model)
    sent = [spec.name for spec, _ in arrival.views]
    return [HEAD] if HEAD in sent and (tied or (tied is None and known and HEAD not in known)) else []
