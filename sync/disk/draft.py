"""A version while it is written: in a folder of its own under a name that nobody takes for a version's, and locked."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ...messages.errors import InvalidField
from .errors import SnapshotError

INDEX = "rolloutmq.json"
"""What a version consists of; there is none without it."""
MAX_VERSION = 10**12 - 1


def folder_name(version: int) -> str:
    """Raises InvalidField for what cannot be a version."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise InvalidField("version", version, f"an integer from 0 to {MAX_VERSION}")
    return f"v{version:012d}"


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Draft:
    """A version that is being written. The index is written last; see `write_index`."""

    def __init__(self, folder: Path, version: int, mutex: Callable[[], AbstractContextManager[None]]) -> None:
        """Only under the folder's mutex, which `mutex` takes."""
        self.version = version
        self.path = path = folder / f".new-{folder_name(version)}-{secrets.token_hex(4)}"
        self._folder, self._mutex = folder, mutex
        self._published = False
        path.mkdir()
        try:
            self._fd = os.open(path / INDEX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if not try_lock(self._fd, fcntl.LOCK_EX):
                raise SnapshotError(f"{path}: a new file is locked already")
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def write_index(self, content: bytes) -> None:
        """The whole index, flushed to disk."""
        with open(self._fd, "wb", closefd=False) as file:
            file.write(content)
            file.flush()
            os.fsync(self._fd)

    @contextmanager
    def reading(self) -> Iterator[tuple[int, int]]:
        """What VersionFolder.reading gives, of what has been written so far."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield folder, self._fd
        finally:
            os.close(folder)

    def publish(self) -> bool:
        """Give the version its name. False, and nothing done, if somebody has written it meanwhile."""
        target = self._folder / folder_name(self.version)
        sync_folder(self.path)
        with self._mutex():
            if os.path.lexists(target):
                return False
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.rename(self.path, target)
            self._published = True
            sync_folder(self._folder)
        return True

    def close(self) -> None:
        """Let go of it; deletes what was not published."""
        if not self._published:
            # While it is locked nobody takes it for dead; half deleted it would look so, but for the other name.
            gone = grave(self.path)
            with suppress(OSError):
                os.rename(self.path, gone)
            delete(gone)
        with suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)


def try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def grave(path: Path) -> Path:
    return path.with_name(f".gone-{path.name.removeprefix('.new-')}-{secrets.token_hex(4)}")


def delete(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink(missing_ok=True)  # somebody's file under such a name


def close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
