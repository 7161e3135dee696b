"""Journals elsewhere, at any URL that fsspec reaches: segments are copied there when they are complete."""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..remote import open_url
from .index import Index
from .locks import is_held
from .segment import SUFFIX

log = logging.getLogger(__name__)
RETRY_S = 5.0
"""Pause after a copy failed."""
LEFT_S = 60.0
"""A segment that was not written to for so long, and that nobody has open, was left by a process that died."""


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A folder or file elsewhere, with those of Path's methods that reading a journal needs.

    Only what is asked for is read: fsspec turns reads of a file into requests for ranges of it.
    """

    filesystem: Any
    path: str

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    def is_dir(self) -> bool:
        return bool(self.filesystem.isdir(self.path))

    def glob(self, pattern: str) -> list[RemotePath]:
        return [RemotePath(self.filesystem, path) for path in self.filesystem.glob(f"{self.path}/{pattern}")]

    def open(self, mode: str) -> Any:
        return self.filesystem.open(self.path, mode)


def is_url(folder: Path | str) -> bool:
    """Whether this is a place for fsspec."""
    return isinstance(folder, str) and "://" in folder


def place_of(folder: Path | str) -> Path | RemotePath:
    """A folder here or elsewhere. Raises ConfigError for a URL that fsspec cannot open."""
    if not is_url(folder):
        return Path(folder)
    filesystem, path = open_url(str(folder), "journal")
    return RemotePath(filesystem, path.rstrip("/"))


def spool_for(url: str) -> Path:
    """The folder here in which segments wait for this URL, the same for every process of a host."""
    name = hashlib.blake2b(url.rstrip("/").encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / "rolloutmq-journal" / name


class Uploader:
    """Moves the segments of a folder to another place, in a thread of its own: each as soon as nobody writes to it any
    more. Also those that dead processes have left. A copy that fails is tried again, until `close`.

    Raises ConfigError.
    """

    def __init__(self, folder: Path, url: str) -> None:
        place = place_of(url)
        assert isinstance(place, RemotePath)
        self._folder, self._to = folder, place
        self._more = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rolloutmq-journal-upload", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """A segment may be complete."""
        self._more.set()

    def close(self, timeout: float) -> None:
        """Move what is complete, once more, and stop. What does not succeed stays for the next process."""
        self._closing = True
        self._more.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            self._more.clear()
            closing, failed = self._closing, not self._move_all()
            if closing:
                return
            self._more.wait(RETRY_S if failed else None)

    def _move_all(self) -> bool:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                if _is_whole(path):
                    self._to.filesystem.makedirs(self._to.path, exist_ok=True)
                    self._to.filesystem.put_file(str(path), f"{self._to.path}/{path.name}")
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # another process has moved it
            except Exception as error:  # of any library: the segment waits
                log.warning("journal: %s cannot be copied to %s, it is tried again: %r", path.name, self._to, error)
                return False
        return True


def _is_whole(path: Path) -> bool:
    """Whether nothing more will be written to a segment."""
    with path.open("rb") as file:
        if Index.read(file) is not None:
            return True
    return time.time() - path.stat().st_mtime > LEFT_S and is_held(path) is False
