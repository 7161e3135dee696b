"""Committed versions to disk, behind the trainer's back: neither training nor the next publication waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch

from ..messages.errors import InvalidField
from .disk import SnapshotStore
from .snapshot import Snapshot

log = logging.getLogger(__name__)


class SnapshotSaver:
    """Saves in a thread of its own, one version at a time; of those that wait the newest wins.

    While a version is being written its copy in memory is kept, even if a newer one has been published meanwhile.

    saved: versions on disk by now. failed: versions that could not be written; that is logged, and harms nobody but
        workers that would have looked for them.
    """

    def __init__(self, store: SnapshotStore, every: int = 1) -> None:
        """every: the first version, and then each `every`th. Raises InvalidField."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InvalidField("snapshot_every", every, "an integer of at least 1")
        self.saved = self.failed = 0
        self._store, self._every, self._count = store, every, 0
        self._next: Snapshot | None = None
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="rolloutmq-snapshots", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """A version has been committed. Returns at once."""
        with self._changed:
            turn = self._count % self._every == 0
            self._count += 1
            if not turn:
                return
            if self._next is not None:
                log.info("version %s is not saved: a newer one waits", self._next.manifest.version)
            self._next = snapshot
            self._changed.notify()

    def close(self) -> None:
        """Save what is under way and what waits, then stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                snapshot, self._next = self._next, None
            if snapshot is None:
                return
            self._save(snapshot)
            del snapshot  # not kept until the next one comes

    def _save(self, snapshot: Snapshot) -> None:
        began, version = time.monotonic(), snapshot.manifest.version
        try:
            with _side_stream(snapshot.device):
                path = self._store.save(snapshot)
        except Exception:  # a full disk must not end anything
            self.failed += 1
            log.exception("version %s could not be saved", version)
            return
        self.saved += 1
        log.info("version %s is saved in %s after %.1f s", version, path, time.monotonic() - began)


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
