"""Finds the committed version in a folder of snapshots, so that nobody needs to send it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from stat import S_ISDIR

from ...messages.errors import ConfigError, RolloutMQError, WeightSyncError
from ...sync.disk import NoSuchSnapshot, SnapshotStore, folder_name
from ...sync.transfer import TransferOrder

log = logging.getLogger(__name__)
SLOWEST = 50e6
"""Bytes per second of the slowest disk. It gives the time limit for a read."""
TIMEOUT_S = 60.0


class Snapshots:
    """Looks for a version in a folder. A snapshot that was refused is not read again unless its files change.

    refused: the last one, and why, for people; (0, "") for none.
    """

    def __init__(self, folder: str) -> None:
        """Raises ConfigError for what can be no folder. One that is not there yet is made by who saves first."""
        self._folder = Path(folder)
        try:
            if not S_ISDIR(self._folder.stat().st_mode):
                raise NotADirectoryError("there is a file of that name")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise ConfigError(f"snapshots={folder!r}: it must be a folder, or become one: {error}") from None
        self._store = SnapshotStore(folder)
        self._refused: set[tuple[int, int, int]] = set()
        self.refused = 0, ""

    async def order(self, version: int, digest: str) -> TransferOrder | None:
        """An order to read `version`, or None if the folder does not have it with the tensors that `digest` names.

        See `WeightManifest.fingerprint`: another run that used the folder may have given the same number.
        "" takes any.
        """
        return await asyncio.to_thread(self._find, version, digest)

    def refuse(self, version: int, why: str) -> None:
        """Do not use this snapshot again, and log the reason once."""
        if (identity := self._identity(version)) is not None and identity not in self._refused:
            self._refused.add(identity)
            self.refused = version, f"the snapshot of version {version} in {self._folder} is refused: {why}"
            log.warning("%s", self.refused[1])

    def _find(self, version: int, digest: str) -> TransferOrder | None:
        identity = self._identity(version)
        if identity is None or identity in self._refused:
            return None
        try:
            with self._store.load(version) as found:
                if digest and found.manifest.fingerprint != digest:
                    raise WeightSyncError("it has other tensors than the version that the pool committed")
                nbytes = found.nbytes
        except NoSuchSnapshot:
            return None
        except (RolloutMQError, OSError) as error:
            self.refuse(version, str(error))
            return None
        return folder_order(str(self._folder), version, nbytes)

    def _identity(self, version: int) -> tuple[int, int, int] | None:
        try:
            found = (self._folder / folder_name(version)).lstat()
        except OSError:
            return None
        return version, found.st_ino, found.st_mtime_ns


def folder_order(path: str, version: int, nbytes: int) -> TransferOrder:
    """An order to load the `nbytes` bytes of a folder as `version`."""
    return TransferOrder.from_disk(path, version, timeout_s=TIMEOUT_S + nbytes / SLOWEST)
