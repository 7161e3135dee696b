"""What can be wrong with weights on disk, all of it under WeightSyncError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike

from ...messages.errors import WeightSyncError


class SnapshotError(WeightSyncError):
    """A snapshot could not be written, read or removed: no room, no permission, no locks on this filesystem."""


class NoSuchSnapshot(SnapshotError):
    """There is no such version on disk: never written, or removed."""


class SnapshotConflict(SnapshotError):
    """This version is on disk with other contents; it is not replaced."""


class BrokenSnapshot(SnapshotError):
    """What is on disk is not what was written: truncated, of another size, garbage, or not a plain file."""


@contextmanager
def disk_errors(doing: str, path: str | PathLike[str]) -> Iterator[None]:
    """OSError becomes SnapshotError that says what was being done, and where."""
    try:
        yield
    except OSError as error:
        raise SnapshotError(f"{doing} {path}: {error.strerror or error}") from error
