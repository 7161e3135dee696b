"""Saves committed versions to disk in the background. Neither training nor the next publication waits for it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from ...messages.errors import WeightSyncError
from ..disk import SnapshotStore, disk_errors
from ..tensors import Snapshot, side_stream

log = logging.getLogger(__name__)


def store_of(snapshots: str | Path | SnapshotStore, keep: int) -> SnapshotStore:
    """Return the store, and make its folder now: so a mistyped path is an error when training begins."""
    if isinstance(snapshots, SnapshotStore):
        return snapshots
    with disk_errors("making", snapshots):
        Path(snapshots).mkdir(parents=True, exist_ok=True)
    return SnapshotStore(snapshots, keep)


class SnapshotSaver:
    """Saves in a thread of its own, one version at a time. Of the versions that wait only the newest is kept.

    While a version is being written its copy stays in memory, even if a newer one is published.

    saved: number of versions written. failed: number of versions that could not be written. A failure is logged; only
        workers that look for that snapshot miss it.
    """

    def __init__(self, store: SnapshotStore, every: int = 1) -> None:
        """every: the first committed version is saved, and then each `every`th."""
        self.saved = self.failed = 0
        self._store, self._every, self._count = store, every, 0
        self._next: Snapshot | None = None
        self._skipped: Snapshot | None = None  # the newest, if it was not its turn
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="rolloutmq-snapshots", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Take a version that has been committed. Returns at once."""
        with self._changed:
            turn = self._count % self._every == 0
            self._count += 1
            self._skipped = None if turn else snapshot
            if not turn:
                return
            if self._next is not None:
                log.info("version %s is not saved: a newer one waits", self._next.manifest.version)
            self._next = snapshot
            self._changed.notify()

    def close(self) -> None:
        """Save the version under way and the newest one, then stop. Blocks.

        Nobody offers a version any more when its trainer has ended: workers that start later find it on disk.
        """
        with self._changed:
            self._closing = True
            self._next = self._skipped or self._next
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
            with side_stream(snapshot.device):
                path = self._store.save(snapshot)
        except WeightSyncError as error:  # a full disk, for example: the text says enough
            self.failed += 1
            log.error("version %s could not be saved: %s", version, error)
            return
        except Exception:  # nothing that fails here may end the thread
            self.failed += 1
            log.exception("version %s could not be saved", version)
            return
        self.saved += 1
        log.info("version %s is saved in %s after %.1f s", version, path, time.monotonic() - began)
