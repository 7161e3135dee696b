"""A weights version as the trainer holds it: packed into buckets, digested, ready to be sent any number of times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ..messages.errors import InvalidField
from ..messages.weights import TensorSpec, WeightManifest
from .digest import digest

BUCKET_BYTES = 256 << 20
ALIGN = 64
"""Every tensor starts at a multiple of this in its bucket, so that a slice of it can be viewed as its own dtype."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version that nobody changes any more. buckets: flat uint8 tensors, as the manifest lays them out."""

    manifest: WeightManifest
    buckets: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Place:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class PackedWeights:
    """Copies of (name, tensor) pairs, taken at once; digests are computed later, by whoever has the time.

    Every tensor is copied before the constructor returns, so training may go on changing the originals.
    Raises InvalidField for a repeated name or something that is not a dense tensor.
    """

    def __init__(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.version = version
        self._places: list[_Place] = []
        self.buckets: list[torch.Tensor] = []
        pending: list[tuple[_Place, torch.Tensor]] = []
        names: set[str] = set()
        size = 0
        for name, tensor in tensors:
            if name in names:
                raise InvalidField("tensors", name, "every name once")
            names.add(name)
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
                raise InvalidField(f"tensors[{name}]", type(tensor).__name__, "dense torch tensors with storage")
            nbytes = tensor.numel() * tensor.element_size()
            if pending and size + nbytes > bucket_bytes:
                self._pack(pending, size)
                pending, size = [], 0
            place = _Place(name, tensor.dtype, tuple(tensor.shape), len(self.buckets), size, nbytes)
            pending.append((place, tensor))
            size += -(-nbytes // ALIGN) * ALIGN
        if not names:
            raise InvalidField("tensors", "nothing", "at least one (name, tensor) pair")
        self._pack(pending, size)

    def _pack(self, pending: list[tuple[_Place, torch.Tensor]], size: int) -> None:
        bucket = torch.zeros(size, dtype=torch.uint8)
        for place, tensor in pending:
            target = bucket[place.offset : place.offset + place.nbytes].view(place.dtype).view(place.shape)
            target.copy_(tensor.detach())
            self._places.append(place)
        self.buckets.append(bucket)

    def snapshot(self) -> Snapshot:
        """With the digests: what is sent and what receivers compare with."""
        tensors = tuple(
            TensorSpec(
                name=place.name,
                dtype=str(place.dtype).removeprefix("torch."),
                shape=place.shape,
                bucket=place.bucket,
                offset=place.offset,
                nbytes=place.nbytes,
                digest=digest(self.buckets[place.bucket][place.offset : place.offset + place.nbytes]),
            )
            for place in self._places
        )
        sizes = tuple(bucket.numel() for bucket in self.buckets)
        return Snapshot(WeightManifest(version=self.version, bucket_nbytes=sizes, tensors=tensors), tuple(self.buckets))


_DTYPE = re.compile(r"(b?float|u?int|complex)[0-9]+(_e[0-9]m[0-9]\w*)?|bool")


def unpack(manifest: WeightManifest, buckets: list[torch.Tensor]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Each tensor of the manifest as a view into its bucket. Raises InvalidField for one that does not fit there."""
    for spec in manifest.tensors:
        dtype = getattr(torch, spec.dtype, None) if _DTYPE.fullmatch(spec.dtype) else None
        if not isinstance(dtype, torch.dtype):
            raise InvalidField(f"{spec.name}.dtype", spec.dtype, "a torch dtype")
        count = 1
        for extent in spec.shape:
            count *= extent
        size = buckets[spec.bucket].numel() if spec.bucket < len(buckets) else -1
        if spec.offset + spec.nbytes > size or count * dtype.itemsize != spec.nbytes or spec.offset % dtype.itemsize:
            raise InvalidField(spec.name, f"{spec.nbytes} bytes at {spec.offset}", f"its shape, inside {size} bytes")
        raw = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        yield spec, raw.view(dtype).view(spec.shape)
