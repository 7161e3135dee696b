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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..codec import Job, Result, encode
from ..errors import ConfigError, InvalidField
from ..model import JobFailure
from ..remote import without_secrets
from .entry import Consumed, Entry, Record, of_consumed, of_jobs, of_outcomes
from .locks import is_held
from .remote import Uploader, is_url, spool_for
from .segment import SUFFIX, Header, Packed, SegmentWriter

log = logging.getLogger(__name__)
BLOCK_BYTES = 512 << 10
"""A block is written when its entries have so many bytes, about, or after `flush_s`."""
ENTRY_BYTES = 200
"""Of an entry beside its message, about."""
RETRY_S = 5.0
"""Pause after the disk refused a write."""
UPLOAD_S = 60.0
"""How long `close` waits for the last segments to be elsewhere. What is not stays for the next process."""

Redact = Callable[[Entry], Entry | None]


class _Waiting(NamedTuple):
    """Entries on their way to the disk: packed, or to be made by the writer's thread. nbytes: what they take, about."""

    packed: Packed | Callable[[], Iterable[Record]]
    entries: int
    nbytes: int


class Journal:
    """A folder to which this process adds segments; others may add theirs to the same one.

    Every method but `flush` and `close` returns at once. If the disk is slower than what comes, or refuses it, then
    beyond `buffer_bytes` entries are dropped; an entry "lost" then says how many. What `flush` returned for is in the
    file and survives the death of the process; it survives that of the machine after `close`, or a rotation.

    folder: is made if it is missing. With a URL that fsspec reaches (s3://…) it is one below the temporary folder, from
    which segments are moved there when they are complete, in the background; see `Uploader`.
    segment_bytes, segment_s: a new segment begins after so many bytes or seconds. keep_bytes, keep_s: segments that
    nobody writes to are deleted, the oldest first, beyond so many bytes of all segments in the folder, or when they
    were last written so many seconds ago; None keeps all. flush_s: the longest time that an entry waits for its
    block. buffer_bytes: of what waits for the disk. redact: is called for each entry, in the writer's thread, and
    returns what is written, or None; if it raises, the entry is written without its message and data, so nothing
    leaks.
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
        elsewhere = str(folder) if is_url(folder) else ""
        if elsewhere:
            for name, value in (("keep_bytes", keep_bytes), ("keep_s", keep_s)):
                if value is not None:
                    raise InvalidField(name, value, "None for a URL: what is kept there is for its own rules")
            self.folder = spool_for(elsewhere)
        self.writer = f"{re.sub(r'[^A-Za-z0-9]', '', socket.gethostname())[:32]}{secrets.token_hex(4)}"
        self.written = self.lost = 0
        """Entries that are in the file, those about losses among them; and that are in none."""
        self._segment_bytes, self._segment_s = segment_bytes, segment_s
        self._keep_bytes, self._keep_s, self._flush_s = keep_bytes, keep_s, flush_s
        self._buffer_bytes, self._redact = buffer_bytes, redact
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = self._lost_untold = 0
        self._state = threading.Condition()
        self._asked = self._done = 0  # flushes
        self._closing = False
        self._number = 0
        self._segment: SegmentWriter | None = None
        self._began = 0.0
        self._uploader = Uploader(self.folder, elsewhere) if elsewhere else None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise ConfigError(f"journal {without_secrets(str(folder))!r}: {error}") from error
        self._thread = threading.Thread(target=self._run, name="rolloutmq-journal", daemon=True)
        self._thread.start()

    # --- what happened ---------------------------------------------------------------------------------------------

    def job(self, job: Job, frame: bytes | None = None) -> None:
        """The pool has accepted a job. frame: the encoded job, if it is there already."""
        self.jobs([job], [frame])

    def jobs(self, jobs: Sequence[Job], frames: Sequence[bytes | None]) -> None:
        """The pool has accepted jobs. frames: of each the encoded job, if it is there already."""
        self._add_all(of_jobs, jobs, frames, time.time())

    def outcome(self, outcome: Result | JobFailure, client_id: str, frame: bytes | None = None) -> None:
        """A result or a failure has arrived. frame: the encoded result, if it is there already."""
        self.outcomes([outcome], client_id, [frame])

    def outcomes(self, outcomes: Sequence[Result | JobFailure], client_id: str, frames: Sequence[bytes | None]) -> None:
        """Results and failures have arrived. frames: of each the encoded result, if it is there already."""
        self._add_all(of_outcomes, outcomes, frames, client_id, time.time())

    def consumed(self, outcomes: Sequence[Consumed], client_id: str) -> None:
        """Their client has acknowledged these: it will not get them again."""
        self.add_records(of_consumed(outcomes, client_id, time.time()))

    def note(self, of: Result | tuple[str, int, int] | str, /, **data: Any) -> None:
        """Say something about a sample: a reward, an advantage, the step that trained on it.

        of: the result, or the ids of its job, its sample and its attempt, or a job's id for something about the whole
        job. data: plain data, and arrays (numpy's, or torch's on the CPU) of numbers, such as a mask or a value for
        each token. Arrays are copied at once; floats of 64 bits become float32. Raises InvalidField.
        """
        place = (of, -1, -1) if isinstance(of, str) else of if isinstance(of, tuple) else Consumed.of(of)
        job_id, sample, attempt = place
        if not isinstance(job_id, str) or not job_id:
            raise InvalidField("job_id", job_id, "a job's id")
        self.add(Entry("note", time.time(), job_id, sample=sample, attempt=attempt, data=data))

    def add(self, entry: Entry) -> None:
        """Any entry. Raises InvalidField for data that is not plain."""
        record = replace(entry, content=None).pack()
        if entry.content is not None:
            record["m"] = entry.content
            self._add(_Waiting(lambda: [record], 1, ENTRY_BYTES + _size(entry.content)))
        else:
            self.add_records([record])

    def add_records(self, records: Iterable[Record]) -> None:
        """Entries of which there are very many, as records with nothing to be encoded."""
        if made := list(records):
            packed = Packed.of(made)
            self._add(_Waiting(made.copy if self._redact else packed, len(made), len(packed.data)))

    def _add_all(
        self, make: Callable[..., Iterable[Record]], things: Sequence[Any], frames: Sequence[bytes | None], *args: Any
    ) -> None:
        sizes = [_size(thing) if frame is None else len(frame) for thing, frame in zip(things, frames, strict=True)]
        if sum(sizes) > BLOCK_BYTES and (half := len(things) // 2):
            for some in (slice(half), slice(half, None)):
                self._add_all(make, things[some], frames[some], *args)
        elif None in frames:
            size = ENTRY_BYTES * len(things) + sum(sizes)
            self._add(_Waiting(partial(make, things, frames, *args), len(things), size))
        else:
            self.add_records(make(things, frames, *args))

    def _add(self, one: _Waiting) -> None:
        with self._state:
            if self._closing:
                return
            if self._waiting_bytes + one.nbytes > self._buffer_bytes:
                self.lost += one.entries
                self._lost_untold += one.entries
                return
            self._waiting.append(one)
            self._waiting_bytes += one.nbytes
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
        if self._uploader is not None:
            self._uploader.close(UPLOAD_S)

    @property
    def not_uploaded(self) -> int:
        """Segments that are here and are to be elsewhere. After `close` the next process of this host moves them."""
        return 0 if self._uploader is None else len(list(self.folder.glob(f"*-{self.writer}-*{SUFFIX}")))

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
                self._abandon()
                if closing:
                    with self._state:
                        self.lost += (more := sum(one.entries for one in self._waiting))
                    log.error("journal %s: %s; %d entries are lost", self.folder, error, more)
                else:
                    log.warning("journal %s: %s; entries wait", self.folder, error)
                    with self._state:
                        self._state.wait_for(lambda: self._closing, RETRY_S)
                    continue
            with self._state:
                self._done = asked
                self._state.notify_all()
            if closing:
                return

    def _write_all(self) -> None:
        """Raises OSError; the entries wait then."""
        while True:
            with self._state:
                taken: list[_Waiting] = []
                nbytes = 0
                for one in self._waiting:
                    taken.append(one)
                    nbytes += one.nbytes
                    if nbytes >= BLOCK_BYTES:
                        break
                lost = self._lost_untold
            if not taken and not lost:
                return
            try:
                packed = [it for one in taken if (it := self._pack(one)) is not None]
                if lost:
                    packed.append(Packed.of([Entry("lost", time.time(), data={"entries": lost}).pack()]))
                if packed:
                    self._block(packed)
            except OSError:
                raise
            except Exception:  # whatever it is, it would come again with the same entries
                log.exception("journal %s: entries are lost", self.folder)
                self._abandon()
                more = sum(one.entries for one in taken)
                self.lost, lost = self.lost + more, lost - more
            with self._state:
                self._waiting_bytes -= nbytes
                self._lost_untold -= lost
                for _ in taken:
                    self._waiting.popleft()

    def _pack(self, one: _Waiting) -> Packed | None:
        if isinstance(one.packed, Packed):
            return one.packed
        records = [it for record in one.packed() if (it := self._ready(record)) is not None]
        return Packed.of(records) if records else None

    def _ready(self, record: Record) -> Record | None:
        """The record as it is written: encoded, and as `redact` wants it."""
        try:
            message = record.get("m")
            if message is not None and not isinstance(message, bytes):
                record["m"] = encode(message)
            if self._redact is None:
                return record
            shown = self._redact(Entry.unpack(record))
            return None if shown is None else shown.pack()
        except Exception as error:  # of the user's function, or a message that cannot be encoded
            log.warning("journal %s: an entry is written without its content: %r", self.folder, error)
            return {name: value for name, value in record.items() if name not in ("m", "d")}

    def _block(self, packed: list[Packed]) -> None:
        segment = self._segment
        if segment is not None and (not segment.is_there or (segment.blocks and self._is_full(segment))):
            self._end_segment()
        if self._segment is None:
            self._begin()
        assert self._segment is not None
        self._segment.block(packed)
        self.written += sum(one.entries for one in packed)

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
            if not segment.is_there:
                log.error("journal %s: %s was deleted: %d are lost", self.folder, segment.path.name, segment.entries)
                with self._state:
                    self.written -= segment.entries
                    self.lost += segment.entries
                    self._lost_untold += segment.entries
            segment.close()
            if self._uploader is not None:
                self._uploader.poke()

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
            if path == mine or is_held(path):
                continue
            old = self._keep_s is not None and now - about.st_mtime > self._keep_s
            if not old and (self._keep_bytes is None or total <= self._keep_bytes):
                break
            path.unlink(missing_ok=True)
            total -= about.st_size


def _size(content: Any) -> int:
    """Bytes of a message, about."""
    if isinstance(content, bytes):
        return len(content)
    arrays = (getattr(content, name, None) for name in ("token_ids", "logprobs", "prompt_ids"))
    return sum(int(getattr(array, "nbytes", 0)) for array in arrays)


def _about(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None  # another process has deleted it
