"""What an engine keeps in mind of the version it holds, so that it can hand it on; and versions it reads from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..messages.errors import WeightSyncError
from ..messages.weights import WeightManifest
from .disk import SnapshotStore
from .disk_read import DiskVersion
from .plan import CopyPlan
from .snapshot import check_places


@dataclass(frozen=True, slots=True)
class Lent:
    """A verified version that is not changed for a while. plan: where its tensors are, if that is known.

    buffers: to pack it into, flat uint8, each as long as the largest bucket.
    """

    manifest: WeightManifest
    plan: CopyPlan | None
    buffers: Sequence[torch.Tensor]


def open_version(folder: str, version: int) -> DiskVersion:
    """A version of a SnapshotStore, its manifest checked against itself. Raises WeightSyncError or InvalidField."""
    if not folder:
        raise WeightSyncError("transport='disk' without a folder")
    opened = SnapshotStore(folder).load(version)
    try:
        check_places(opened.manifest)
    except BaseException:
        opened.close()
        raise
    return opened


def read_into(opened: DiskVersion, buckets: Sequence[torch.Tensor], go_on: Callable[[], None]) -> None:
    """Every tensor to its place, its digest compared on the way. Raises DigestMismatch, SnapshotError and its kinds.

    buckets: flat uint8 in host memory. go_on(): asked before each tensor; raises what ends the reading.
    """
    for spec, tensor in opened:
        go_on()
        place = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        place.copy_(tensor.reshape(-1).view(torch.uint8))
