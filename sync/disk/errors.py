"""Errors of weights on disk. All of them are WeightSyncErrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from ...messages.errors import WeightSyncError


class SnapshotError(WeightSyncError):
    """A snapshot could not be written, read or removed: no room, no permission, no locks on this filesystem."""


class NoSuchSnapshot(SnapshotError):
    """This version is not on disk: it was never written, or has been removed."""


class SnapshotConflict(SnapshotError):
    """This version is already on disk with other contents. It is not replaced."""


class BrokenSnapshot(SnapshotError):
    """A file is not what was written: it is truncated, of another size, garbage, or not a plain file."""


@contextmanager
def disk_errors(doing: str, path: str | PathLike[str]) -> Iterator[None]:
    """Turn an OSError into a SnapshotError that says what was being done, and where."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{doing} {path}: {error.strerror or error}") from error
