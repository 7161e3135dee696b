"""Weights versions on disk, as safetensors checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ...messages.errors import WeightSyncError
from .errors import NoSuchSnapshot, SnapshotConflict, SnapshotError, disk_errors
from .folder import Draft, VersionFolder, folder_name
from .index import same_tensors
from .read import DiskVersion

if TYPE_CHECKING:
    from ..tensors import Snapshot

log = logging.getLogger(__name__)
FILE_BYTES = 5 << 30
"""Most bytes in a safetensors file. Other writers of checkpoints use the same size."""


class SnapshotStore(VersionFolder):
    """A folder of versions that any number of processes may share. folder.py says what the filesystem must do.

    Guarantees: whichever process is killed at any moment, `versions` names only whole versions. A version that is
    pinned or being read is not removed. Every wait ends after LOCK_TIMEOUT_S. Every error is a WeightSyncError.

    Args:
        folder: the first `save` makes it.
        keep: number of newest versions that `save` keeps, besides pinned ones.
        base: a model's folder. Its configuration and tokenizer files are copied into each version, so that any loader
            can read it as a checkpoint.
        file_bytes: most bytes in a safetensors file.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        *,
        base: str | Path | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        super().__init__(Path(folder), keep)
        self._base = None if base is None else Path(base)
        self._file_bytes = file_bytes

    def save(self, snapshot: Snapshot) -> Path:
        """Write a version, then remove old ones. Does nothing if the version is there with the same tensors.

        The buckets may be on a GPU. Work that is queued on the caller's current stream is waited for. Blocks until all
        is on disk, so call it from a thread. Raises SnapshotConflict if the version is there with other tensors,
        SnapshotError if the filesystem refuses something (then nothing is left behind), DigestMismatch if a file does
        not hold what the manifest says, and InvalidField for a dtype that safetensors does not have.
        """
        version = snapshot.manifest.version
        path = self.path / folder_name(version)
        if self._is_there(snapshot):
            return path
        with disk_errors("writing", path), self.draft(version) as draft:
            self._write(draft, snapshot)
            if not draft.publish() and not self._is_there(snapshot):
                raise SnapshotError(f"{path} is in the way, and is not a version")
        try:
            self.collect(spare=(version,))
        except WeightSyncError:
            log.exception("old versions in %s could not be removed", self.path)
        return path

    def load(self, version: int | None = None) -> DiskVersion:
        """Open a version, by default the newest. Close it, or use it in a `with`.

        Raises NoSuchSnapshot, BrokenSnapshot or SnapshotError.
        """
        if version is None:
            found = self.versions()
            if not found:
                raise NoSuchSnapshot(f"there is no version in {self.path}")
            version = found[-1]
        return DiskVersion(version, self.path / folder_name(version), self.reading(version))

    def _is_there(self, snapshot: Snapshot) -> bool:
        try:
            with self.load(snapshot.manifest.version) as found:
                if same_tensors(found.manifest, snapshot.manifest):
                    return True
                raise SnapshotConflict(f"{found.path} has other tensors than the ones to be saved")
        except NoSuchSnapshot:
            return False

    def _write(self, draft: Draft, snapshot: Snapshot) -> None:
        from .write import write_version  # noqa: PLC0415  # needs torch

        write_version(draft, snapshot, self._base, self._file_bytes)
        with DiskVersion(draft.version, draft.path, draft.reading()) as written:
            written.verify()
