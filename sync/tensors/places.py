"""The place of each tensor in its bucket: computed while the tensors come, or known from the version before."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from ...messages.errors import InvalidField
from ...messages.model import TensorSpec

ALIGN = 64
"""Bytes. Every tensor starts at a multiple of this in its bucket, so its bytes can be viewed as its dtype."""
MOST_DIMENSIONS = 16
LONGEST_NAME = 512

_DTYPE = re.compile(r"(b?float|u?int|complex)[0-9]+(_e[0-9]m[0-9]\w*)?|bool")


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name without the prefix ("bfloat16"), or "" for a dtype that no manifest has (quantized ones)."""
    name = str(dtype).removeprefix("torch.")
    return name if _DTYPE.fullmatch(name) else ""


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of that name, or None. `name` comes from outside, and torch has other attributes too."""
    found = getattr(torch, name, None) if _DTYPE.fullmatch(name) else None
    return found if isinstance(found, torch.dtype) else None


def padded(nbytes: int) -> int:
    """Return `nbytes` rounded up to where the next tensor may start."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor's bytes: [offset, offset + nbytes) of bucket number `bucket`, in row-major order."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int

    def spec(self, digest: str, bucket: int | None = None) -> TensorSpec:
        """Return the manifest's entry. bucket: the bucket's number in the manifest, if it differs."""
        return TensorSpec(
            name=self.name,
            dtype=dtype_name(self.dtype),
            shape=self.shape,
            bucket=self.bucket if bucket is None else bucket,
            offset=self.offset,
            nbytes=self.nbytes,
            digest=digest,
        )

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of its bucket, a flat uint8 tensor. Nothing is copied."""
        return bucket[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Places:
    """All places of a version, bucket after bucket, in the order of the tensors. sizes: bytes of each bucket."""

    bucket_bytes: int
    sizes: tuple[int, ...]
    tensors: tuple[Place, ...]


class PlacePlanner:
    """Gives tensors their places one after the other, so that a stream of them can be packed while it comes.

    A bucket is closed when the next tensor would make it larger than `bucket_bytes`. A larger tensor has a bucket for
    itself. like: places of an earlier version. As long as names, dtypes and shapes are the same, nothing is computed or
    checked again. If all are the same, `done` returns this very object.
    """

    def __init__(self, bucket_bytes: int, like: Places | None = None) -> None:
        if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise InvalidField("bucket_bytes", bucket_bytes, "a positive number of bytes")
        self._bucket_bytes = bucket_bytes
        self._like = like if like is not None and like.bucket_bytes == bucket_bytes else None
        self._places: list[Place] = []
        self._names: set[str] = set()
        self._sizes: list[int] = []
        self._size = 0

    def place(self, name: str, tensor: Any) -> Place:
        """Return the next tensor's place.

        Raises InvalidField for a name that is empty, too long, or was there before, and for a dtype or a shape that no
        manifest has.
        """
        place = self._known(name, tensor) or self._new(name, tensor)
        if place.bucket > len(self._sizes):
            self._sizes.append(self._size)
        self._size = place.offset + padded(place.nbytes)
        self._places.append(place)
        return place

    def _known(self, name: str, tensor: Any) -> Place | None:
        if self._like is None:
            return None
        index = len(self._places)
        if index < len(self._like.tensors):
            place = self._like.tensors[index]
            if place.name == name and place.dtype is tensor.dtype and place.shape == tensor.shape:
                return place
        self._names = {place.name for place in self._places}
        self._like = None
        return None

    def _new(self, name: str, tensor: Any) -> Place:
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
            raise InvalidField("tensors", name, f"names of 1 to {LONGEST_NAME} characters")
        if name in self._names:
            raise InvalidField("tensors", name, "every name once")
        if not dtype_name(tensor.dtype):
            raise InvalidField(f"tensors[{name}].dtype", str(tensor.dtype), "bool, integers, floats or complex numbers")
        if tensor.ndim > MOST_DIMENSIONS:
            raise InvalidField(f"tensors[{name}].ndim", tensor.ndim, f"at most {MOST_DIMENSIONS} dimensions")
        self._names.add(name)
        nbytes = tensor.numel() * tensor.element_size()
        bucket, offset = len(self._sizes), self._size
        if offset and offset + nbytes > self._bucket_bytes:
            bucket, offset = bucket + 1, 0
        return Place(name, tensor.dtype, tuple(tensor.shape), bucket, offset, nbytes)

    def done(self) -> Places:
        """Return all places, once the last tensor has one. Raises InvalidField if there was no tensor."""
        if not self._places:
            raise InvalidField("tensors", "nothing", "at least one (name, tensor) pair")
        if self._like is not None and len(self._like.tensors) == len(self._places):
            return self._like
        return Places(self._bucket_bytes, (*self._sizes, self._size), tuple(self._places))

    def expected(self) -> int:
        """Return the bytes of the earlier version, which are likely to come again, or 0."""
        return sum(self._like.sizes) if self._like is not None else 0
