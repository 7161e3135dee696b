"""Versions and checkpoints on disk, opened alike."""

from __future__ import annotations

from pathlib import Path

from ...messages.errors import WeightSyncError
from ..disk import VERSION_FOLDER, DiskVersion, SnapshotStore
from ..disk.checkpoint import Checkpoint, checkpoint_format
from ..tensors import check_places


def open_version(path: str, version: int) -> DiskVersion | Checkpoint:
    """Open `version` of a SnapshotStore's folder, or a folder that is one version or one checkpoint, under that number.

    The manifest is checked against itself. Raises WeightSyncError or InvalidField.
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
