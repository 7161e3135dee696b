"""A file of JSON lines to which one process at a time appends, and with which another one goes on after a crash."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from ..messages.errors import ConfigError
from .files import json_lines, writing

SYNC_S = 1.0


class Records:
    """Appends records to a file and reads those of earlier runs. A record that was cut off by a crash does not count.

    option, what: how errors name the setting that has the path, and the program that writes such files.
    Raises InvalidField if the file cannot be opened, and ConfigError while another process writes it.
    """

    def __init__(self, option: str, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._synced, self._lost = 0.0, False
        self._whole = 0
        with writing(option, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("ab+")
        try:
            self._lock()
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

    def read(self) -> tuple[list[Any], bool]:
        """The values of the whole lines, and whether anything is behind them. Raises InvalidField: it is no JSON."""
        self._file.seek(0)
        content = self._file.read()
        self._whole = content.rfind(b"\n") + 1
        found = [value for _, value in json_lines(content[: self._whole].split(b"\n"))]
        return found, self._whole < len(content)

    def drop_torn_end(self) -> None:
        """Remove what `read` found behind the whole lines: a crash cut it off, so nobody relies on it."""
        self._file.truncate(self._whole)

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
