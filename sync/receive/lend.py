"""What an engine that keeps no received buckets offers to others: the version, read back out of its parameters.

It is packed as the trainer's manifest lays it out, under the trainer's digests. So receivers verify it against the
trainer, not against this engine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...messages.errors import WeightSyncError
from ...messages.model import TensorSpec, WeightManifest
from ..packing import fill
from ..plan import CopyPlan, PlanImpossible
from ..tensors import Place, dtype_named, side_stream
from ..wire import Brief, Offer
from .compatibility import TIED


def held_tensors(plan: CopyPlan | None) -> dict[str, torch.Tensor]:
    """Views of an engine's parameters under the checkpoint's names. Raises PlanImpossible with the reason."""
    if plan is None:
        raise PlanImpossible("how this engine loads its weights cannot be turned round")
    return plan.export()


def held_offer(token: str, told: Brief, plan: CopyPlan) -> Offer:
    """Offer a version out of the parameters that hold it. They do not change until the offer is withdrawn.

    What it takes to read it back is set up when somebody asks. Who asks an engine that cannot do it is told why.
    """
    held = _Held(told, plan)
    offer = Offer(token, lambda: held.ready.manifest, len(told.outline.bucket_nbytes), held.bucket)
    offer.arrived()
    return offer


class _Held:
    def __init__(self, told: Brief, plan: CopyPlan) -> None:
        self._told, self._plan = told, plan
        self._lock = threading.Lock()
        self._ready: _Ready | None = None

    @property
    def ready(self) -> _Ready:
        with self._lock:
            if self._ready is None:
                self._ready = _ready(self._told.manifest(), held_tensors(self._plan))
            return self._ready

    def bucket(self, index: int) -> torch.Tensor:
        ready = self.ready
        inside = ready.inside[index]
        device = inside[0][1].device if inside else torch.device("cpu")
        with side_stream(device):
            made = torch.zeros(ready.manifest.bucket_nbytes[index], dtype=torch.uint8, device=device)
            fill(made, inside)
            return made.cpu()


@dataclass(frozen=True, slots=True)
class _Ready:
    manifest: WeightManifest
    inside: list[list[tuple[Place, torch.Tensor]]]


def _ready(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> _Ready:
    """tensors: by name. A tied tensor may be missing: another one with its digest has its bits.

    Raises WeightSyncError, which names a tensor that is not kept, or not as it was sent.
    """
    inside: list[list[tuple[Place, torch.Tensor]]] = [[] for _ in manifest.bucket_nbytes]
    for spec in manifest.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None and spec.name in TIED:
            tensor = next((tensors[one.name] for one in manifest.tensors if _same_bits(one, spec, tensors)), None)
        if tensor is None:
            raise WeightSyncError(f"the engine does not keep {spec.name}, so it cannot hand it on")
        dtype = dtype_named(spec.dtype)
        if dtype is None or (tensor.dtype, tuple(tensor.shape)) != (dtype, spec.shape):
            raise WeightSyncError(f"the engine holds {spec.name} as {tensor.dtype} {tuple(tensor.shape)}")
        place = Place(spec.name, dtype, spec.shape, spec.bucket, spec.offset, spec.nbytes)
        inside[spec.bucket].append((place, tensor))
    return _Ready(manifest, inside)


def _same_bits(one: TensorSpec, spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> bool:
    return one.name in tensors and (one.digest, one.dtype, one.shape) == (spec.digest, spec.dtype, spec.shape)
