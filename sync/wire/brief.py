"""A version in brief: its layout's name, its number and its digests.

A receiver that knows the layout needs no manifest.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

from ...messages.errors import DigestMismatch
from ...messages.model import TensorSpec, WeightManifest
from ..tensors import hex_of, values_of

NAME_BYTES = 16
_HEAD = struct.Struct(f"<{NAME_BYTES}sq")


def layout_name(manifest: WeightManifest) -> str:
    """Return 32 hex digits. They are equal for manifests that differ only in version and digests."""
    places = [(t.name, t.dtype, t.shape, t.bucket, t.offset) for t in manifest.tensors]
    return hashlib.blake2b(repr((manifest.bucket_nbytes, places)).encode(), digest_size=NAME_BYTES).hexdigest()


def layout_of(brief: bytes) -> str:
    """Return the layout's name of a version in brief."""
    return brief[:NAME_BYTES].hex()


@dataclass(frozen=True, slots=True)
class Brief:
    """A version as its sender announced it: its layout and its digests.

    layout: see `layout_name`. outline: a manifest of that layout, of any version. digests: (tensors,) int64 on the CPU,
    in the outline's order. nbytes: bytes of all tensors.
    """

    layout: str
    outline: WeightManifest
    version: int
    digests: torch.Tensor
    nbytes: int

    @classmethod
    def of(cls, manifest: WeightManifest) -> Brief:
        """Make it from a version's manifest."""
        digests = values_of([spec.digest for spec in manifest.tensors])
        return cls(layout_name(manifest), manifest, manifest.version, digests, manifest.nbytes)

    def manifest(self) -> WeightManifest:
        """Return the version's own manifest. Its parts were checked when they arrived."""
        tensors = tuple(
            TensorSpec.model_construct(**(dict(spec) | {"digest": digest}))
            for spec, digest in zip(self.outline.tensors, hex_of(self.digests), strict=True)
        )
        return self.outline.model_copy(update={"version": self.version, "tensors": tensors})

    def to_bytes(self) -> bytes:
        """Encode it for `updated`: 16 bytes of the layout's name, int64 version, int64 digests, all little-endian."""
        head = _HEAD.pack(bytes.fromhex(self.layout), self.version)
        digests: bytes = self.digests.numpy().astype("<i8").tobytes()
        return head + digests

    def updated(self, brief: bytes) -> Brief | None:
        """Return the version that `brief` describes, or None if it has another layout than this one.

        Raises DigestMismatch for bytes that are no version in brief.
        """
        if len(brief) < _HEAD.size:
            raise DigestMismatch(f"a version in brief of {len(brief)} bytes; at least {_HEAD.size}")
        name, version = _HEAD.unpack_from(brief)
        if name.hex() != self.layout:
            return None
        if len(brief) != _HEAD.size + 8 * len(self.outline.tensors):
            raise DigestMismatch(f"a version in brief of {len(brief)} bytes, for {len(self.outline.tensors)} tensors")
        digests = torch.from_numpy(np.frombuffer(brief, "<i8", offset=_HEAD.size).astype(np.int64))
        return Brief(self.layout, self.outline, version, digests, self.nbytes)
