"""Where the weights of each version are on this host."""

from __future__ import annotations

from pathlib import Path

from ...messages.errors import InvalidField
from ...sync.disk import INDEX, NoSuchSnapshot, SnapshotStore, folder_name
from .settings import Settings


class Weights:
    """Finds the folder of a version, or of a version of an adapter.

    model: folder or hub name of the base model. settings: where the recorded versions are, or what replaces them.
    Raises InvalidField for a folder that is not there.
    """

    def __init__(self, model: str, settings: Settings) -> None:
        for name in ("snapshots", "weights", "adapters"):
            folder: Path | None = getattr(settings, name)
            if folder is not None and not folder.is_dir():
                raise InvalidField(f"--{name}", str(folder), "a folder")
        self.model, self._settings = model, settings

    def path_of(self, version: int) -> Path:
        """The folder of a version, a safetensors checkpoint; for version 0 the base model, which may be a hub name.

        Raises NoSuchSnapshot, which says why there is none.
        """
        settings = self._settings
        if settings.weights is not None:
            return settings.weights
        if version == 0:
            return Path(self.model)
        if settings.snapshots is None:
            raise NoSuchSnapshot(f"version {version} sampled it, and no folder of snapshots was given (--snapshots)")
        path = settings.snapshots / folder_name(version)
        if not path.is_dir():
            raise NoSuchSnapshot(f"there is no snapshot of version {version} in {settings.snapshots}")
        return path

    def verified_path_of(self, version: int) -> Path:
        """The folder of a version. A snapshot's contents are compared with their digests; nothing else has any.

        Raises NoSuchSnapshot, and BrokenSnapshot or DigestMismatch for one that is not what was published.
        """
        path, snapshots = self.path_of(version), self._settings.snapshots
        if snapshots is not None and path.parent == snapshots and (path / INDEX).exists():
            with SnapshotStore(snapshots).load(version) as opened:
                opened.verify()
        return path

    def adapter_path_of(self, name: str, version: int) -> Path:
        """The folder of a version of an adapter. Raises NoSuchSnapshot, which says why there is none."""
        if self._settings.adapters is None:
            raise NoSuchSnapshot(
                f"adapter {name}@{version} sampled it, and no folder of adapters was given (--adapters)"
            )
        path = self._settings.adapters / f"{name}@{version}"
        if not path.is_dir():
            raise NoSuchSnapshot(f"there is no folder {name}@{version} in {self._settings.adapters}")
        return path


def weights_size(path: Path) -> int:
    """Bytes of a checkpoint's tensors."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
