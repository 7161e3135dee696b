"""A file of JSON lines to which one process at a time appends, and with which another one goes on after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ..messages.errors import ConfigError, InvalidField
from .files import json_lines, writing

SYNC_S = 1.0


class Records:
    """Appends records to a file and goes on with those of an earlier run. A record that a crash cut off does not count.

    Its first line has what was `asked`, which must be the same each time, and what `begin` adds in a new file.
    `restore` takes that line and the records behind it. It may raise ValueError, LookupError, TypeError or
    AttributeError for those of another origin.

    option, what: how errors name the setting that has the path, and the program that writes such files.
    Raises InvalidField if the file cannot be opened. Raises ConfigError while another process writes it, and for a file
    of another origin, or with what else was asked for: it stays as it is.
    """

    def __init__(
        self,
        option: str,
        path: Path,
        what: str,
        *,
        asked: dict[str, Any],
        begin: dict[str, Any],
        restore: Callable[[dict[str, Any], list[Any]], None],
    ) -> None:
        self.path, self._what = path, what
        self._synced, self._lost = 0.0, False
        with writing(option, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab+")
        try:
            self._lock()
            if not self._resume(asked, restore):
                self.write(begin | {"asked": asked})
                self.sync(now=True)
                sync_folder(path)
                restore(begin, [])
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path}: another {self._what} is writing it") from None
        if not self.path.exists() or not os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
            raise ConfigError(f"{self.path}: another {self._what} has just finished it")

    def _resume(self, asked: dict[str, Any], restore: Callable[[dict[str, Any], list[Any]], None]) -> bool:
        """Whether there was an earlier run."""
        self._file.seek(0)
        content = self._file.read()
        if not content:
            return False
        whole = content.rfind(b"\n") + 1
        try:
            first, *records = [value for _, value in json_lines(content[:whole].split(b"\n"))]
            before = first["asked"]
            changed = [f"{name}={before.get(name)!r}, not {value!r}" for name, value in asked.items()
                       if before.get(name) != value]  # fmt: skip
            if not changed:
                restore(first, records)
        except (InvalidField, LookupError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{self.path} is no file of {self._what}; remove it, or name another one") from None
        if changed:
            told = f"was begun with {', '.join(changed)}; give the same again, or remove it to start over"
            raise ConfigError(f"{self.path} {told}")
        self._file.truncate(whole)  # nobody relies on a record that was cut off
        return True

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; `sync` puts it on the disk. Raises ConfigError."""
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error}") from error

    def sync(self, now: bool) -> bool:
        """Sync what was written to the disk, at most once in SYNC_S unless `now`. Returns whether it was done.

        A client that has this as its `before_ack` acknowledges only what is on the disk. Raises ConfigError.
        """
        if self._lost or (not now and time.monotonic() < self._synced + SYNC_S):
            return False
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._lost = True  # a second fsync would succeed, and what the first one dropped would still be missing
            raise ConfigError(f"{self.path} cannot be written: {error}") from error
        self._synced = time.monotonic()
        return True

    def close(self) -> None:
        """Let others write. Errors are ignored: what could not be written was told, and was not acknowledged."""
        with contextlib.suppress(OSError):
            self._file.close()


def sync_folder(file: Path) -> None:
    """Sync the folder of a file: before that, a power cut can take its new name away."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
