"""Weights versions on disk, as safetensors checkpoints: written whole or not at all, verified when they are read."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ...messages.errors import InvalidField, WeightSyncError
from .errors import NoSuchSnapshot, SnapshotConflict, SnapshotError, disk_errors
from .folder import LOCK_TIMEOUT_S, Draft, VersionFolder, folder_name
from .index import same_tensors
from .read import DiskVersion

if TYPE_CHECKING:
    from ..tensors import Snapshot

log = logging.getLogger(__name__)
FILE_BYTES = 5 << 30
"""Size of a safetensors file, as other writers of checkpoints have it."""


class SnapshotStore:
    """A folder of versions, shared by any number of processes; see folder.py for what the filesystem must do.

    Guarantees: whatever process is killed whenever, `versions` names only whole versions; a version that is pinned, or
    read by anybody, is not removed. Every wait ends after `lock_timeout_s`. All that goes wrong is a WeightSyncError.

    Args:
        folder: made by the first `save`.
        keep: newest versions that `save` leaves; pinned ones are kept besides.
        base: a model's folder, whose configuration and tokenizer files are copied into each version, so that it can
            be loaded like any checkpoint.
        verify: read every new version back before it gets its name.
        file_bytes: size of a safetensors file.
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 2,
        *,
        base: str | Path | None = None,
        verify: bool = True,
        file_bytes: int = FILE_BYTES,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidField("keep", keep, "an integer of at least 1")
        self._folder = VersionFolder(Path(folder), lock_timeout_s)
        self._keep = keep
        self._base = None if base is None else Path(base)
        self._verify = verify
        self._file_bytes = file_bytes

    def save(self, snapshot: Snapshot) -> Path:
        """Write a version, then remove old ones. Nothing is done if the same version is there with the same tensors.

        The buckets may be on a GPU; work queued on the caller's current stream is waited for. Blocks until all is on
        disk: call it from a thread. Raises SnapshotConflict if the version is there with other tensors, SnapshotError
        for what the filesystem refuses (nothing is left behind then), DigestMismatch if what was written is not what
        the manifest says, InvalidField for a dtype that safetensors does not have.
        """
        version = snapshot.manifest.version
        path = self._folder.path / folder_name(version)
        if self._is_there(snapshot):
            return path
        with disk_errors("writing", path), self._folder.draft(version) as draft:
            self._write(draft, snapshot)
            if not draft.publish() and not self._is_there(snapshot):
                raise SnapshotError(f"{path} is in the way, and is no version")
        try:
            self._folder.collect(self._keep, spare=(version,))
        except WeightSyncError:
            log.exception("old versions in %s could not be removed", self._folder.path)
        return path

    def versions(self) -> list[int]:
        """Whole ones, oldest first."""
        return self._folder.versions()

    def load(self, version: int | None = None) -> DiskVersion:
        """Open a version, by default the newest; to be closed, or used in a `with`.

        Raises NoSuchSnapshot, BrokenSnapshot or SnapshotError.
        """
        if version is None:
            found = self.versions()
            if not found:
                raise NoSuchSnapshot(f"no version is in {self._folder.path}")
            version = found[-1]
        return DiskVersion(version, self._folder.path / folder_name(version), self._folder.reading(version))

    def pin(self, version: int) -> None:
        """Keep a version whatever comes after it. Raises NoSuchSnapshot."""
        self._folder.pin(version)

    def unpin(self, version: int) -> None:
        """The version may be removed."""
        self._folder.unpin(version)

    def pinned(self) -> set[int]:
        """Versions that are kept whatever their age."""
        return self._folder.pinned()

    def collect(self) -> list[int]:
        """Remove all but the newest `keep`, the pinned and those being read; returns what was removed."""
        return self._folder.collect(self._keep)

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
        if self._verify:
            with DiskVersion(draft.version, draft.path, draft.reading()) as written:
                written.verify()
