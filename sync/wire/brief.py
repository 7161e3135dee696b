"""A version in brief, for receivers that know its layout: the layout's name, the version's number, the digests."""

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
_SHOWN = 16
_HEAD = struct.Struct(f"<{NAME_BYTES}sq")


def layout_name(manifest: WeightManifest) -> str:
    """32 hex digits, equal for manifests that differ in nothing but version and digests."""
    places = [(t.name, t.dtype, t.shape, t.bucket, t.offset) for t in manifest.tensors]
    return hashlib.blake2b(repr((manifest.bucket_nbytes, places)).encode(), digest_size=NAME_BYTES).hexdigest()


def group_for(name: str, layout: str) -> str:
    """A group's name that says how each version lies: who stands in it need not ask how the next one does."""
    return f"{name}-{layout[:_SHOWN]}"


def is_group_for(group: str, layout: str) -> bool:
    """Whether that is the name of a group for this layout."""
    return group.endswith(f"-{layout[:_SHOWN]}")


@dataclass(frozen=True, slots=True)
class Brief:
    """A version as its sender told of it: how it lies, and its digests.

    layout: `layout_name`. outline: a manifest of that layout, whichever version's. digests: (tensors,) int64 on the
    CPU, in the outline's order. nbytes: of all tensors.
    """

    layout: str
    outline: WeightManifest
    version: int
    digests: torch.Tensor
    nbytes: int

    @classmethod
    def of(cls, manifest: WeightManifest) -> Brief:
        """A version whose manifest is at hand."""
        digests = values_of([spec.digest for spec in manifest.tensors])
        return cls(layout_name(manifest), manifest, manifest.version, digests, manifest.nbytes)

    def manifest(self) -> WeightManifest:
        """The version's own. Its parts were checked when they came."""
        tensors = tuple(
            TensorSpec.model_construct(**(dict(spec) | {"digest": digest}))
            for spec, digest in zip(self.outline.tensors, hex_of(self.digests), strict=True)
        )
        return self.outline.model_copy(update={"version": self.version, "tensors": tensors})

    def to_bytes(self) -> bytes:
        """What `updated` reads: 16 bytes of the layout's name, int64 version, int64 digests, all little-endian."""
        head = _HEAD.pack(bytes.fromhex(self.layout), self.version)
        digests: bytes = self.digests.numpy().astype("<i8").tobytes()
        return head + digests

    def updated(self, brief: bytes) -> Brief | None:
        """The version that `brief` is about, if it lies as this one does; else None.

        Raises DigestMismatch for a brief that is none.
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
