"""What an engine that keeps no received buckets offers to others: the version, read back out of its parameters.

It is packed as the trainer's manifest lays it out, under the trainer's digests. So receivers verify it against the
trainer, not against this engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from ...messages.errors import WeightSyncError
from ...messages.model import TensorSpec, WeightManifest
from ..packing import fill
from ..plan import CopyPlan, PlanImpossible
from ..tensors import Place, dtype_named, side_stream
from ..wire import Brief, Offer
from .compatibility import TIED

Inside = list[tuple[Place, torch.Tensor]]
"""The tensors of one bucket, each with its place."""


def held_tensors(plan: CopyPlan | None) -> dict[str, torch.Tensor]:
    """Views of an engine's parameters under the checkpoint's names. Raises PlanImpossible with the reason."""
    if plan is None:
        raise PlanImpossible("how this engine loads its weights cannot be turned round")
    return plan.export()


def held_offer(token: str, told: Brief, plan: CopyPlan) -> Offer:
    """Offer a version out of the parameters that hold it. They do not change until the offer is withdrawn.

    What it takes to read it back is set up when somebody asks. Who asks an engine that cannot do it is told why.
    """

    @cache
    def ready() -> tuple[WeightManifest, list[Inside]]:
        manifest = told.manifest()
        return manifest, laid_out(manifest, held_tensors(plan))

    def bucket(index: int) -> torch.Tensor:
        manifest, laid = ready()
        inside = laid[index]
        device = inside[0][1].device if inside else torch.device("cpu")
        with side_stream(device):
            made = torch.zeros(manifest.bucket_nbytes[index], dtype=torch.uint8, device=device)
            fill(made, inside)
            return made.cpu()

    offer = Offer(token, lambda: ready()[0], len(told.outline.bucket_nbytes), bucket)
    offer.arrived()
    return offer


def laid_out(manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]) -> list[Inside]:
    """Return the tensors of each bucket. tensors: by name. A tied one may be missing: another has its digest and bits.

    Raises WeightSyncError, which names a tensor that is not kept, or not as it was sent.
    """
    buckets: list[Inside] = [[] for _ in manifest.bucket_nbytes]
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
        buckets[spec.bucket].append((place, tensor))
    return buckets


def _same_bits(one: TensorSpec, spec: TensorSpec, tensors: Mapping[str, torch.Tensor]) -> bool:
    return one.name in tensors and (one.digest, one.dtype, one.shape) == (spec.digest, spec.dtype, spec.shape)
