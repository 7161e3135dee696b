"""From received buckets into the model: by recorded copies, or by `load_weights` where those cannot be recorded."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ...messages.errors import DigestMismatch
from ...messages.model import WeightManifest
from ..plan import CopyPlan, PlanImpossible
from .names import TIED
from .verify import Arrival, Readback

log = logging.getLogger(__name__)


class Model(Protocol):
    """The model that a version is loaded into, as SGLang has it.

    If it has `named_parameters`, as torch modules do, it can be loaded by recorded copies and read back.
    """

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any: ...


class Loading:
    """Loads one layout of buckets into one model. Worked out once, and used by every update with that layout."""

    def __init__(self, model: Model, plan: CopyPlan | None, arrival: Arrival) -> None:
        """plan: of `plan_for`; None to call `load_weights`. arrival: of the buckets to load from."""
        self._model = model
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

    def load(self, bucket: int, *, beside_wire: bool = False) -> None:
        """Queue the copies of one bucket on the current stream. beside_wire: other buckets arrive meanwhile."""
        if self._bounds is None:
            self._model.load_weights(self._by_bucket[bucket])
        else:
            self._bounds[bucket].run(beside_wire=beside_wire)

    def load_all(self, expected: torch.Tensor | None) -> None:
        """Queue the copies of every bucket. Unless `expected` is None, wait for them and compare as `check` does."""
        for bucket in range(len(self._by_bucket)):
            self.load(bucket)
            if expected is not None:
                self.queue_readback(bucket)
        if expected is not None:
            self.check(expected)

    def queue_readback(self, bucket: int, *, count: bool = False) -> None:
        """Queue digests of the parameters that one bucket was loaded into. The bucket must not have changed since.

        count: count NaN and Inf, too.
        """
        if self._readback is not None:
            self._readback.queue(bucket, count)

    def check(self, expected: torch.Tensor, *, finite: bool = False) -> None:
        """Wait for the queued digests and compare them. Raises DigestMismatch with the first wrong tensor's name.

        expected: (tensors,) int64 on the CPU, the version's digests. finite: refuse NaN and Inf, too. Needed if the
        buckets were not looked at on arrival.
        """
        if self._readback is not None:
            self._readback.check(expected, finite=finite)


def plan_for(model: Model, manifest: WeightManifest, known: frozenset[str], *, must: bool = False) -> CopyPlan | None:
    """Record the copies that load this layout into `model`. Returns None if they cannot be recorded.

    known: names in the model's checkpoint, if they are known. The model's loader may skip some of them.
    must: whether another layout could be recorded with this model. If this one cannot, it is refused.

    Must run where nothing else uses the model, and does not change it. Raises DigestMismatch if a tensor would be
    ignored, or a parameter would keep its old values: SGLang only logs such names.
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
