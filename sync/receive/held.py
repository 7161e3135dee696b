"""What an engine keeps in mind of the version it holds, so that it can hand it on; and versions it reads from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...messages.errors import WeightSyncError
from ...messages.model import WeightManifest
from ..disk import DiskVersion, SnapshotStore
from ..disk.checkpoint import VERSION_FOLDER, Checkpoint, checkpoint_format
from ..plan import CopyPlan
from ..tensors import check_places


@dataclass(frozen=True, slots=True)
class Lent:
    """A verified version that is not changed for a while. plan: where its tensors are, if that is known.

    buffers: to pack it into, flat uint8, each as long as the largest bucket.
    """

    manifest: WeightManifest
    plan: CopyPlan | None
    buffers: Sequence[torch.Tensor]


def open_version(path: str, version: int) -> DiskVersion | Checkpoint:
    """What a folder has, as `version`: that one of a SnapshotStore, or a single version or checkpoint, renumbered.

    Its manifest is checked against itself. Raises WeightSyncError or InvalidField.
    """
    if not path:
        raise WeightSyncError("transport='disk' without a folder")
    opened: DiskVersion | Checkpoint
    kind = checkpoint_format(path)
    if kind == "sharded":
        raise WeightSyncError(f"{path} is a sharded state: only engines of the same kind load it, rank by rank")
    if kind == "safetensors":
        opened = Checkpoint(Path(path), version)
    elif kind == "snapshot":
        folder = Path(path).resolve()
        named = VERSION_FOLDER.fullmatch(folder.name)
        assert named is not None
        opened = SnapshotStore(folder.parent).load(int(named[1]))
        renumbered = opened.manifest.model_copy(update={"version": version})
        opened.index = opened.index.model_copy(update={"manifest": renumbered})
    else:
        opened = SnapshotStore(path).load(version)
    try:
        check_places(opened.manifest)
    except BaseException:
        opened.close()
        raise
    return opened


def read_into(opened: DiskVersion | Checkpoint, buckets: Sequence[torch.Tensor], go_on: Callable[[], None]) -> None:
    """Every tensor to its place, its digest compared on the way. Raises DigestMismatch, SnapshotError and its kinds.

    buckets: flat uint8 in host memory. go_on(): asked before each tensor; raises what ends the reading.
    """
    for spec, tensor in opened:
        go_on()
        place = buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
        place.copy_(tensor.reshape(-1).view(torch.uint8))
