"""A weights version that no longer changes: what a trainer sends, and what a receiver finds in its buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from ...messages.errors import InvalidField
from ...messages.model import TensorSpec, WeightManifest
from .places import dtype_named

_MOST_BYTES = 1 << 62
"""Sizes and offsets above this would overflow in torch."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version with its digests, ready to be sent any number of times.

    buckets: flat uint8 tensors, as the manifest lays them out. All are on one CUDA device, or all in host memory
        (pinned, if they come from a GPU).
    nonfinite: names of the tensors with NaN or Inf, in the manifest's order.
    """

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...]
    nonfinite: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """The buckets' device."""
        return self.buckets[0].device

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor). The tensors are views of the buckets: do not write to them."""
        return ((spec.name, tensor) for spec, tensor in unpack(self.manifest, self.buckets))


def unpack(manifest: WeightManifest, buckets: Sequence[torch.Tensor]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield each tensor of the manifest as a view of its bucket. All are checked before the first one is yielded.

    Raises InvalidField for a manifest that does not fit the buckets, or itself; see `check_places`.
    """
    dtypes = check_places(manifest)
    sizes = tuple(bucket.numel() for bucket in buckets)
    if sizes != manifest.bucket_nbytes:
        raise InvalidField("bucket_nbytes", manifest.bucket_nbytes, f"the sizes of the buckets, {sizes}")
    for spec, dtype in zip(manifest.tensors, dtypes, strict=True):
        raw = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        yield spec, raw.view(dtype).view(spec.shape)


def check_places(manifest: WeightManifest) -> list[torch.dtype]:
    """Check that a manifest describes memory without contradictions. Returns the dtypes of its tensors.

    It trusts nothing and allocates nothing. Every name is there once and every dtype is torch's. Each tensor has as
    many bytes as its shape takes, inside its bucket, at a place where its dtype may start, and shares none with
    another. Raises InvalidField.
    """
    sizes = manifest.bucket_nbytes
    if sum(sizes) > _MOST_BYTES:
        raise InvalidField("bucket_nbytes", sum(sizes), f"at most {_MOST_BYTES} bytes together")
    dtypes, names = [], set()
    for spec in manifest.tensors:
        if spec.name in names:
            raise InvalidField("tensors", spec.name, "every name once")
        names.add(spec.name)
        dtypes.append(_dtype(spec))
        if spec.bucket >= len(sizes):
            raise InvalidField(f"{spec.name}.bucket", spec.bucket, f"below {len(sizes)}, the number of buckets")
        size = sizes[spec.bucket]
        if spec.offset + spec.nbytes > size:
            raise InvalidField(spec.name, f"{spec.nbytes} bytes at {spec.offset}", f"inside {size} bytes")
    taken = sorted((spec for spec in manifest.tensors if spec.nbytes), key=lambda spec: (spec.bucket, spec.offset))
    for one, other in pairwise(taken):
        if one.bucket == other.bucket and one.offset + one.nbytes > other.offset:
            raise InvalidField(f"{other.name}.offset", other.offset, f"after the last byte of {one.name}")
    return dtypes


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = dtype_named(spec.dtype)
    if dtype is None:
        raise InvalidField(f"{spec.name}.dtype", spec.dtype, "a torch dtype")
    extents = 1
    for extent in spec.shape:
        extents *= max(extent, 1)  # torch computes strides of empty tensors, too
    count = 0 if 0 in spec.shape else extents
    if extents * dtype.itemsize > _MOST_BYTES or count * dtype.itemsize != spec.nbytes:
        raise InvalidField(spec.name, f"{spec.nbytes} bytes", f"as many as {spec.dtype} of shape {spec.shape} takes")
    if spec.offset % dtype.itemsize:
        raise InvalidField(f"{spec.name}.offset", spec.offset, f"a multiple of {dtype.itemsize}")
    return dtype
