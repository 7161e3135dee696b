"""A folder of weights versions. Names and locks decide who may write, read and remove one.

    v000000000012/        a version; it is whole as soon as it has this name
    v000000000012.pin     keeps that version from being collected
    .new-v…-3f2a91c0/     being written; the writer holds an exclusive lock on the rolloutmq.json in it
    .gone-v…-77ab03de/    being deleted
    .lock                 held for the moment in which one of these names is made or changed

A version gets its name by one rename, after everything in it has been flushed to disk. It loses the name by one rename,
before anything in it is deleted. So a crash at any moment leaves a version whole, or not there. Locks end with their
process, so a folder without a lock was left by a dead writer. Readers hold a shared lock on the version's
rolloutmq.json.

docs/weights.md says what the filesystem must do. On NFS mounted with `nolock` or `local_lock`, one host must do all
writing and collecting, and no other host may read what is collected.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from ...messages.errors import InvalidField
from .errors import BrokenSnapshot, NoSuchSnapshot, SnapshotError, disk_errors

LOCK_TIMEOUT_S = 30.0
"""Seconds to wait for a lock that another process holds for a moment. Nobody waits for those of readers and
writers, which last longer."""
_POLL_S = 0.01
VERSION_FOLDER = re.compile(r"v([0-9]{12})")
_PIN = re.compile(r"v([0-9]{12})\.pin")


class VersionFolder:
    """Names and locks. Methods raise SnapshotError (or one of its kinds) if the filesystem refuses something.

    keep: number of newest versions that `collect` leaves.
    """

    def __init__(self, path: Path, keep: int = 2) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidField("keep", keep, "an integer of at least 1")
        self.path, self._keep = path, keep

    def versions(self) -> list[int]:
        """List the versions, oldest first. The list is empty if there is no folder."""
        with disk_errors("listing", self.path):
            return [version for version in self._numbers(VERSION_FOLDER) if self._whole(version)]

    def pinned(self) -> set[int]:
        """Return the versions that are kept whatever their age."""
        with disk_errors("listing", self.path):
            return set(self._numbers(_PIN))

    def pin(self, version: int) -> None:
        """Keep a version until it is unpinned. Raises NoSuchSnapshot."""
        pin = self.path / f"{folder_name(version)}.pin"
        with disk_errors("pinning", pin):
            if not self.path.is_dir():
                raise NoSuchSnapshot(f"version {version} is not in {self.path}")
            with self._mutex():
                if not self._whole(version):
                    raise NoSuchSnapshot(f"version {version} is not in {self.path}")
                pin.touch()
                sync_folder(self.path)

    def unpin(self, version: int) -> None:
        """Let the version be collected again. Nothing happens if it was not pinned."""
        pin = self.path / f"{folder_name(version)}.pin"
        with disk_errors("unpinning", pin):
            pin.unlink(missing_ok=True)

    @contextmanager
    def draft(self, version: int) -> Iterator[Draft]:
        """Give a new folder to write `version` into. It is deleted at the end unless it was published."""
        folder_name(version)
        with disk_errors("writing into", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with self._mutex():
                self._set_aside_dead_drafts()
                draft = Draft(self.path, version, self._mutex)
            self._empty_bin()
        try:
            yield draft
        finally:
            draft.close()

    @contextmanager
    def reading(self, version: int) -> Iterator[tuple[int, int]]:
        """Give file descriptors of the version's folder and of its index. Until the end nobody removes the version.

        Raises NoSuchSnapshot, and BrokenSnapshot if the index is not a plain file.
        """
        path = self.path / folder_name(version)
        folder, index = self._open_shared(path, version)
        try:
            yield folder, index
        finally:
            fcntl.flock(index, fcntl.LOCK_UN)  # explicitly: a child that was forked meanwhile has the descriptor too
            os.close(index)
            os.close(folder)

    def collect(self, spare: Collection[int] = ()) -> list[int]:
        """Remove all but the newest `keep` versions, pinned versions, those in `spare`, and those being read.

        Returns the removed versions. Leftovers of dead writers are removed too.
        """
        removed: list[int] = []
        if not self.path.is_dir():
            return removed
        with disk_errors("collecting in", self.path):
            with self._mutex():
                self._set_aside_dead_drafts()
                for version in self.collectable(spare):
                    if self._set_aside(self.path / folder_name(version)):
                        removed.append(version)
                sync_folder(self.path)  # else a power cut could bring back the name without all of its files
            self._empty_bin()
        return removed

    def collectable(self, spare: Collection[int] = ()) -> list[int]:
        """The versions that `collect` would remove, oldest first, unless somebody reads them."""
        kept = self.pinned() | set(spare)
        return [version for version in self.versions()[: -self._keep] if version not in kept]

    def _numbers(self, pattern: re.Pattern[str]) -> list[int]:
        with suppress(FileNotFoundError):
            return sorted(int(match[1]) for name in os.listdir(self.path) if (match := pattern.fullmatch(name)))
        return []

    def _whole(self, version: int) -> bool:
        path = self.path / folder_name(version)
        try:
            return stat.S_ISDIR(path.lstat().st_mode) and stat.S_ISREG((path / INDEX).lstat().st_mode)
        except FileNotFoundError:
            return False

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while not try_lock(fd, fcntl.LOCK_EX):
                self._pause(deadline, self.path / ".lock")
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def _pause(self, deadline: float, what: Path) -> None:
        if time.monotonic() >= deadline:
            raise SnapshotError(f"{what} has been locked by another process for {LOCK_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)

    def _open_shared(self, path: Path, version: int) -> tuple[int, int]:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            folder = index = -1
            try:
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                index = os.open(INDEX, flags, dir_fd=folder)
                # If it was removed between the open and the lock, its name leads nowhere, or to another folder.
                if try_lock(index, fcntl.LOCK_SH) and os.path.samestat(os.fstat(index), os.lstat(path / INDEX)):
                    return folder, index
            except FileNotFoundError:
                close_all(folder, index)
                raise NoSuchSnapshot(f"version {version} is not in {self.path}") from None
            except OSError as error:
                close_all(folder, index)
                kind = BrokenSnapshot if error.errno in (errno.ELOOP, errno.ENOTDIR) else SnapshotError
                raise kind(f"opening {path}: {error.strerror}") from error
            close_all(folder, index)
            self._pause(deadline, path / INDEX)

    def _set_aside_dead_drafts(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith(".new-"):
                self._set_aside(self.path / name)

    def _set_aside(self, path: Path) -> bool:
        """Rename a folder for deletion, unless somebody holds a lock in it. Only under the mutex."""
        try:
            fd = os.open(path / INDEX, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)  # writable: NFS locks nothing else
        except (FileNotFoundError, NotADirectoryError):
            fd = -1  # its writer died before it could lock anything: both happen under the mutex
        try:
            if fd >= 0 and not try_lock(fd, fcntl.LOCK_EX):
                return False
            os.rename(path, grave(path))
        except FileNotFoundError:
            return False  # its writer has deleted it meanwhile
        finally:
            close_all(fd)
        return True

    def _empty_bin(self) -> None:
        """Delete the folders that were renamed for it. A later call tries again what fails now."""
        for name in os.listdir(self.path):
            if name.startswith(".gone-"):
                delete(self.path / name)


INDEX = "rolloutmq.json"
"""The file that describes a version. A folder without it is not a version."""
MAX_VERSION = 10**12 - 1


def folder_name(version: int) -> str:
    """Return the name of a version's folder. Raises InvalidField if `version` cannot be one."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise InvalidField("version", version, f"an integer from 0 to {MAX_VERSION}")
    return f"v{version:012d}"


def sync_folder(path: Path) -> None:
    """Flush a folder's names to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Draft:
    """A version that is being written. Its index is written last."""

    def __init__(self, folder: Path, version: int, mutex: Callable[[], AbstractContextManager[None]]) -> None:
        """To be called under the folder's mutex, which `mutex` takes."""
        self.version = version
        self.path = path = folder / f".new-{folder_name(version)}-{secrets.token_hex(4)}"
        self._folder, self._mutex = folder, mutex
        self._published = False
        path.mkdir()
        try:
            self._fd = os.open(path / INDEX, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            if not try_lock(self._fd, fcntl.LOCK_EX):
                raise SnapshotError(f"{path}: the new file is already locked")
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def write_index(self, content: bytes) -> None:
        """Write the whole index and flush it to disk."""
        with open(self._fd, "wb", closefd=False) as file:
            file.write(content)
            file.flush()
            os.fsync(self._fd)

    @contextmanager
    def reading(self) -> Iterator[tuple[int, int]]:
        """Give the descriptors that `VersionFolder.reading` gives, for the files written so far."""
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield folder, self._fd
        finally:
            os.close(folder)

    def publish(self) -> bool:
        """Give the version its name. Returns False and does nothing if somebody has written it meanwhile."""
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
        """Release the lock. Deletes the folder if it was not published."""
        if not self._published:
            # Renamed first: a half deleted folder would look like one that a dead writer has left.
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
        path.unlink(missing_ok=True)  # somebody has put a file under such a name


def close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
