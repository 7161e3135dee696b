"""Weights versions on disk. A version is written whole or not at all, and verified when it is read."""

from .errors import BrokenSnapshot, NoSuchSnapshot, SnapshotError, disk_errors
from .export import export_version
from .folder import INDEX, VERSION_FOLDER, folder_name
from .read import DiskVersion
from .store import FILE_BYTES, SnapshotStore

__all__ = [
    "FILE_BYTES",
    "INDEX",
    "VERSION_FOLDER",
    "BrokenSnapshot",
    "DiskVersion",
    "NoSuchSnapshot",
    "SnapshotError",
    "SnapshotStore",
    "disk_errors",
    "export_version",
    "folder_name",
]
