"""Writes a journal: what happened is handed over at once and reaches the disk from a thread of its own."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgpack

from ..codec import Job, Result
from ..errors import ConfigError, InvalidField
from ..model import JobFailure
from .entry import Entry, note, of_job, of_outcome
from .segment import SUFFIX, Header, SegmentWriter

log = logging.getLogger(__name__)
BLOCK_BYTES = 512 << 10
"""A block is written when its entries have so many bytes, about, or after `flush_s`."""
ENTRY_BYTES = 200
"""Of an entry beside its message, about."""
RETRY_S = 5.0
"""Pause after the disk refused a write."""

Redact = Callable[[Entry], Entry | None]


class Journal:
    """A folder to which this process adds segments; others may add theirs to the same one.

    Every method but `flush` and `close` returns at once. If the disk is slower than what comes, or refuses it, then
    beyond `buffer_bytes` entries are dropped; an entry "lost" then says how many. What `flush` returned for is in the
    file and survives the death of the process; it survives that of the machine after `close`, or a rotation.

    folder: is made if it is missing. segment_bytes, segment_s: a new segment begins after so many bytes or seconds.
    keep_bytes, keep_s: complete segments are deleted, the oldest first, beyond so many bytes of all segments in the
    folder, or when they were last written so many seconds ago; None keeps all. flush_s: the longest time that an entry
    waits for its block. redact: is called for each entry, in the writer's thread, and returns what is written, or None;
    if it raises, the entry is written without its message and data, so nothing leaks.
    Raises ConfigError if the folder cannot be written, InvalidField.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        segment_bytes: int = 64 << 20,
        segment_s: float = 3600.0,
        keep_bytes: int | None = None,
        keep_s: float | None = None,
        flush_s: float = 1.0,
        buffer_bytes: int = 64 << 20,
        redact: Redact | None = None,
    ) -> None:
        limits = {
            "segment_bytes": segment_bytes, "segment_s": segment_s, "keep_bytes": keep_bytes, "keep_s": keep_s,
            "flush_s": flush_s, "buffer_bytes": buffer_bytes,
        }  # fmt: skip
        for name, value in limits.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise InvalidField(name, value, "a number above 0")
        self.folder = Path(folder)
        self.writer = f"{re.sub(r'[^A-Za-z0-9]', '', socket.gethostname())[:32]}{secrets.token_hex(4)}"
        self.lost = 0
        self._segment_bytes, self._segment_s = segment_bytes, segment_s
        self._keep_bytes, self._keep_s, self._flush_s = keep_bytes, keep_s, flush_s
        self._buffer_bytes, self._redact = buffer_bytes, redact
        self._waiting: deque[tuple[Entry, int]] = deque()
        self._waiting_bytes = self._lost_untold = 0
        self._state = threading.Condition()
        self._asked = self._done = 0  # flushes
        self._closing = False
        self._number = 0
        self._segment: SegmentWriter | None = None
        self._began = 0.0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise ConfigError(f"journal {str(folder)!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="rolloutmq-journal", daemon=True)
        self._thread.start()

    # --- what happened ---------------------------------------------------------------------------------------------

    def job(self, job: Job, frame: bytes | None = None) -> None:
        """The pool has accepted a job. frame: the encoded job, if it is there already."""
        self.add(of_job(job, time.time(), frame))

    def outcome(self, outcome: Result | JobFailure, client_id: str, frame: bytes | None = None) -> None:
        """A result or a failure has arrived. frame: the encoded result, if it is there already."""
        self.add(of_outcome(outcome, client_id, time.time(), frame))

    def note(self, of: Result | tuple[str, int, int] | str, /, **data: Any) -> None:
        """Say something about a sample: a reward, an advantage, the step that trained on it.

        of: the result, or the ids of its job, its sample and its attempt, or a job's id for something about the whole
        job. data: plain data, arrays as lists. Raises InvalidField.
        """
        if isinstance(of, str):
            place = (of, -1, -1)
        else:
            place = of if isinstance(of, tuple) else (of.job_id, of.sample, of.attempt)
        try:
            msgpack.packb(data)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidField("data", data, f"plain data: {error}") from None
        self.add(note(*place, data, time.time()))

    def add(self, entry: Entry) -> None:
        """Any entry."""
        size = ENTRY_BYTES + _size(entry)
        with self._state:
            if self._closing:
                return
            if self._waiting_bytes + size > self._buffer_bytes:
                self.lost += 1
                self._lost_untold += 1
                return
            self._waiting.append((entry, size))
            self._waiting_bytes += size
            if self._waiting_bytes >= BLOCK_BYTES:
                self._state.notify_all()

    # --- the disk --------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was added by now is in the file. False if it is not within `timeout` seconds."""
        with self._state:
            self._asked += 1
            mine = self._asked
            self._state.notify_all()
            return self._state.wait_for(lambda: self._done >= mine or not self._thread.is_alive(), timeout)

    def close(self) -> None:
        """Write what waits, complete the segment, and stop. Later entries are ignored."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._closing or self._asked > self._done or self._waiting_bytes >= BLOCK_BYTES,
                    self._flush_s,
                )
                asked, closing = self._asked, self._closing
            try:
                self._write_all()
                if closing:
                    self._end_segment()
            except OSError as error:
                log.warning("journal %s: %s; entries wait", self.folder, error)
                self._abandon()
                if not closing:
                    with self._state:
                        self._state.wait_for(lambda: self._closing, RETRY_S)
                    continue
            except Exception:
                log.exception("journal %s: entries are left out", self.folder)
            with self._state:
                self._done = asked
                self._state.notify_all()
            if closing:
                return

    def _write_all(self) -> None:
        """Raises OSError; the entries wait then."""
        while True:
            with self._state:
                taken: list[Entry] = []
                size = 0
                while len(taken) < len(self._waiting) and size < BLOCK_BYTES:
                    taken.append(self._waiting[len(taken)][0])
                    size += self._waiting[len(taken) - 1][1]
                lost = self._lost_untold
            if not taken and not lost:
                return
            packed = [one for entry in taken if (one := self._pack(entry)) is not None]
            if lost:
                packed.append(Entry("lost", time.time(), data={"entries": lost}).pack())
            if packed:
                self._block(packed)
            with self._state:
                for _ in taken:
                    self._waiting_bytes -= self._waiting.popleft()[1]
                self._lost_untold -= lost

    def _pack(self, entry: Entry) -> dict[str, Any] | None:
        try:
            shown = entry if self._redact is None else self._redact(entry)
            return None if shown is None else shown.pack()
        except Exception as error:  # of the user's function, or a message that cannot be encoded
            log.warning("journal %s: an entry is written without its content: %r", self.folder, error)
            bare = Entry(entry.event, entry.at, entry.job_id, entry.client_id, entry.group_id, entry.sample,
                         entry.attempt, entry.versions)  # fmt: skip
            return bare.pack()

    def _block(self, packed: list[dict[str, Any]]) -> None:
        if self._segment is not None and self._segment.blocks and self._is_full(self._segment):
            self._end_segment()
        if self._segment is None:
            self._begin()
        assert self._segment is not None
        self._segment.block(packed)

    def _is_full(self, segment: SegmentWriter) -> bool:
        return segment.nbytes >= self._segment_bytes or time.monotonic() - self._began >= self._segment_s

    def _begin(self) -> None:
        self._segment = SegmentWriter(self.folder, Header(self.writer, self._number, time.time()))
        self._number += 1
        self._began = time.monotonic()
        self._make_room()

    def _end_segment(self) -> None:
        if (segment := self._segment) is not None:
            self._segment = None
            segment.close()

    def _abandon(self) -> None:
        """After an error nothing more is written to a segment: it may end in the midst of a block."""
        if (segment := self._segment) is not None:
            self._segment = None
            segment.close(complete=False)

    def _make_room(self) -> None:
        """Delete the oldest segments, as `keep_bytes` and `keep_s` say."""
        if self._keep_bytes is None and self._keep_s is None:
            return
        mine = self._segment.path if self._segment is not None else None
        found = {path: about for path in sorted(self.folder.glob(f"*{SUFFIX}")) if (about := _about(path)) is not None}
        total, now = sum(about.st_size for path, about in found.items() if path != mine), time.time()
        for path, about in found.items():
            if path == mine:
                continue
            old = self._keep_s is not None and now - about.st_mtime > self._keep_s
            if not old and (self._keep_bytes is None or total <= self._keep_bytes):
                break
            path.unlink(missing_ok=True)
            total -= about.st_size


def _size(entry: Entry) -> int:
    """Bytes of an entry's content, about."""
    if isinstance(entry.content, bytes):
        return len(entry.content)
    arrays = (getattr(entry.content, name, None) for name in ("token_ids", "logprobs", "prompt_ids"))
    return 100 * len(entry.data) + sum(int(getattr(array, "nbytes", 0)) for array in arrays)


def _about(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None  # another process has deleted it
