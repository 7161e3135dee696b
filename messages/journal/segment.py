"""A segment: one file of a journal. Any `zstd -d` turns it into a stream of msgpack values.

    frame 0     a zstd frame with a map: {"format": "rolloutmq-journal", "major", "minor", "writer", "number", "at"}
    frame 1…    a zstd frame each, with an array of entries (see `Entry.pack`)
    the last    a skippable frame with the index, as soon as the segment is complete: see `Index`

Every zstd frame has its size and a checksum. A writer that dies leaves a file that ends in the midst of a frame, or
after one: what is before it is whole. A segment is never written to again by another process. Several segments may be
merged into a new one (merge.py), whose header names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgpack
import numpy as np
import numpy.typing as npt
from msgpack.exceptions import UnpackException

from ..errors import ConfigError, MalformedMessage, MessageError, UnsupportedVersion
from .entry import Entry, Record
from .index import INDEX_MAGIC, Index, hashes_of
from .locks import is_held, lock

MERGED = "merged"
"""The writer of a segment that others were merged into has a name that begins so."""
FORMAT, MAJOR, MINOR = "rolloutmq-journal", 1, 2
SUFFIX = ".journal.zst"
LEVEL = 1
"""zstd's fast one. Level 3 takes twice the time, and token ids with their log-probabilities become no smaller."""
MAX_BLOCK = 256 << 20
"""Bytes of a block without compression that a reader accepts."""
MAX_ELEMENTS = 1 << 21
"""Elements of lists and maps in a block that a reader accepts. An empty list is one byte there and 72 in memory.
Writers write less: one entry, which has entry.py's MAX_ELEMENTS at most, behind half a MiB of others."""
TORN = "its writer died or still writes; all before that is whole"
"""Problems that cost nothing of what was written end with it."""
ZSTD_MAGIC = (0xFD2FB528).to_bytes(4, "little")
SEARCH, STEPS = 256, 1 << 14
"""Behind damage so many places are tried, and a frame that begins there has at most so many blocks of zstd."""


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a segment. writer: an id of the process. number: of the segment, from 0. at: when it began.

    replaces: names of the segments that were merged into this one. While they are still there, readers leave them out.
    minor: of the format.
    """

    writer: str
    number: int
    at: float
    replaces: tuple[str, ...] = ()
    minor: int = MINOR

    @property
    def name(self) -> str:
        """The file's. Names sort by time, then by writer."""
        return f"{int(self.at * 1000):014d}-{self.writer}-{self.number:06d}{SUFFIX}"

    def pack(self) -> dict[str, Any]:
        told = {"writer": self.writer, "number": self.number, "at": self.at}
        replaces = {"replaces": list(self.replaces)} if self.replaces else {}
        return {"format": FORMAT, "major": MAJOR, "minor": self.minor} | told | replaces

    @classmethod
    def unpack(cls, packed: Any) -> tuple[Self, bool]:
        """The header, and whether a newer minor version wrote it. Raises MalformedMessage, UnsupportedVersion."""
        if not isinstance(packed, dict) or packed.get("format") != FORMAT:
            raise MalformedMessage("no segment of a journal")
        major, minor = packed.get("major"), packed.get("minor")
        if major != MAJOR or type(minor) is not int:
            raise UnsupportedVersion(f"a journal of version {major}.{minor}; this side reads {MAJOR}.x")
        writer, number, at = packed.get("writer"), packed.get("number"), packed.get("at")
        if type(writer) is not str or type(number) is not int or type(at) is not float:
            raise MalformedMessage("a segment whose header is damaged")
        replaces = packed.get("replaces", [])
        if not isinstance(replaces, list) or not all(type(name) is str and _is_ours(name) for name in replaces):
            raise MalformedMessage("a segment whose header is damaged")
        return cls(writer, number, at, tuple(replaces), minor), minor > MINOR


def _is_ours(name: str) -> bool:
    """Whether it can be the name of a segment in this folder: what is replaced is deleted."""
    return name.endswith(SUFFIX) and not {"/", "\0"}.intersection(name) and len(name.encode()) <= 255


def zstd() -> Any:
    """The module zstandard: a trainer that keeps no journal does without. Raises ConfigError."""
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"a journal needs zstandard ({error}): pip install 'rolloutmq[journal]'") from None
    return zstandard


_INDEX = INDEX_MAGIC.to_bytes(4, "little")


class Packed(NamedTuple):
    """Entries as msgpack, one behind the other, and what an index says of them. first, last: their times."""

    data: bytes
    entries: int
    job_ids: list[str]
    first: float
    last: float

    @staticmethod
    def of(records: list[Record]) -> Packed:
        """Of one record or more. All bytes at once: a record of its own is a dict, and thousands that wait are work
        for Python's garbage collector."""
        data: bytes = msgpack.packb(records)
        head = 1 if len(records) < 1 << 4 else 3 if len(records) < 1 << 16 else 5
        times = [record["t"] for record in records]
        ids = [record["j"] for record in records if "j" in record]
        return Packed(data[head:], len(records), ids, min(times), max(times))


class SegmentWriter:
    """Writes one segment, and holds a lock on it meanwhile. Not thread-safe. Every method raises OSError; after that
    the segment is not written to."""

    def __init__(self, folder: Path, header: Header) -> None:
        self.path = folder / header.name
        self.nbytes = 0
        self._compress = zstd().ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True).compress
        self._file = self.path.open("xb", buffering=0)
        lock(self._file)
        self._offsets: list[int] = []
        self._times: list[tuple[float, float]] = []
        self._jobs: list[npt.NDArray[np.uint64]] = []  # hashes of those in each block
        self.entries = 0
        try:
            self._write(self._compress(msgpack.packb(header.pack())))
        except OSError:  # nothing is in it, and the next one gets its number
            self._file.close()
            self.path.unlink()
            raise

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name: others may delete it."""
        return os.fstat(self._file.fileno()).st_nlink > 0

    def block(self, packed: Sequence[Packed]) -> None:
        """Write packed entries as one block."""
        head = msgpack.Packer().pack_array_header(sum(one.entries for one in packed))
        frame = self._compress(b"".join([head, *(one.data for one in packed)]))
        self._jobs.append(hashes_of({job_id for one in packed for job_id in one.job_ids}))
        self._offsets.append(self.nbytes)
        self._times.append((min(one.first for one in packed), max(one.last for one in packed)))
        self._write(frame)
        self.entries += sum(one.entries for one in packed)

    @property
    def blocks(self) -> int:
        """How many have been written."""
        return len(self._offsets)

    def close(self, complete: bool = True) -> None:
        """complete: with its index, and on the disk."""
        try:
            if complete:
                self._write(self._index().pack())
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _index(self) -> Index:
        jobs = np.concatenate([np.empty(0, np.uint64), *self._jobs])
        blocks = np.repeat(np.arange(len(self._jobs), dtype=np.int32), [len(one) for one in self._jobs])
        order = np.argsort(jobs, kind="stable")
        return Index(
            np.array(self._offsets, np.int64),
            np.array([first for first, _ in self._times], np.float64),
            np.array([last for _, last in self._times], np.float64),
            jobs[order],
            blocks[order],
        )

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) or 0 :]
        self.nbytes += len(data)


def _unpack(block: bytes) -> Any:
    """What is in a block. Raises ValueError for more than MAX_ELEMENTS, and what msgpack raises."""
    left = MAX_ELEMENTS

    def counted(value: Any) -> Any:
        nonlocal left
        left -= len(value)
        if left < 0:
            raise ValueError(f"it has more than {MAX_ELEMENTS} elements")
        return value

    return msgpack.unpackb(
        block,
        max_ext_len=0,
        max_array_len=MAX_ELEMENTS,
        max_map_len=MAX_ELEMENTS,
        list_hook=counted,
        object_hook=counted,
    )


class SegmentReader:
    """Reads one segment, block by block. problem(text): is told what is damaged; reading goes on after it."""

    def __init__(self, path: Any, problem: Callable[[str], None]) -> None:
        """path: a Path, or something else that `open`s as one does. Raises OSError, MalformedMessage and
        UnsupportedVersion."""
        self._path, self._problem, self._zstd = path, problem, zstd()
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise MalformedMessage("no file")  # a pipe would be waited for, and a device has no end
        self._told: set[str] = set()
        self._complete = True
        self._file = path.open("rb")
        try:
            first = next(self._values(0, only_one=True), None)
            if first is None:
                raise MalformedMessage("a segment without a header: its writer died as it began")
            self.header, newer = Header.unpack(first)
        except BaseException:
            self._file.close()
            raise
        if newer:
            problem(f"{path}: a newer minor version wrote it; what is unknown here is left out")
        self._complete = Index.length(self._file) is not None
        self.index = Index.read(self._file)
        if self._complete and self.index is None:
            problem(f"{path}: its index is damaged, so all of it is read")

    def close(self) -> None:
        self._file.close()

    def entries(self, job_ids: frozenset[str] | None, since: float, until: float) -> Iterator[Entry]:
        """Entries in the order in which they were written: of these jobs (None: all), and times that may fit."""
        for packed in self._blocks(job_ids, since, until):
            if not isinstance(packed, list):
                self._problem(f"{self._path}: a block that is no array")
                continue
            for one in packed:
                try:
                    entry = Entry.unpack(one)
                except MessageError as error:
                    if str(error) not in self._told:  # of entries of an unknown kind there may be very many
                        self._told.add(str(error))
                        self._problem(f"{self._path}: {error}")
                else:
                    yield entry

    def _blocks(self, job_ids: frozenset[str] | None, since: float, until: float) -> Iterator[Any]:
        if self.index is None:
            values = self._values(0)
            next(values, None)  # the header
            yield from values
            return
        numbers = range(len(self.index.offsets)) if job_ids is None else self.index.blocks_of(job_ids)
        for number in numbers:
            if self.index.lasts[number] >= since and self.index.firsts[number] <= until:
                yield from self._values(int(self.index.offsets[number]), only_one=True)

    def _values(self, offset: int, only_one: bool = False) -> Iterator[Any]:
        """What is in the frames from here on, until the end or the index. After damage it goes on at the next one."""
        place = offset
        while True:
            frame, why = self._frame(place)
            if frame is None:
                behind = self._next(place + 1) if why and not only_one else None
                if behind is None:
                    if why:
                        self._problem(f"{self._path}: {why}")
                    return
                self._problem(f"{self._path}: bytes {place} to {behind} are damaged and left out")
                place = behind
                continue
            behind = place + len(frame)
            try:
                yield _unpack(self._zstd.decompress(frame))
            except (ValueError, TypeError, RecursionError, UnpackException, self._zstd.ZstdError) as error:
                self._problem(f"{self._path}: a block is damaged and left out: {error or type(error).__name__}")
                if isinstance(error, self._zstd.ZstdError) and not only_one:  # its length may be what is wrong
                    behind = min(behind, self._next(place + 1) or behind)
            place = behind
            if only_one:
                return

    def _next(self, place: int) -> int | None:
        """Where the next whole frame begins, from `place` on."""
        for _ in range(SEARCH):
            if (found := self._find(place)) is None:
                return None
            frame, _ = self._frame(found, STEPS)
            if frame is not None:
                self._file.seek(found + len(frame))
                if self._file.read(4) in {b"", ZSTD_MAGIC, _INDEX}:
                    try:
                        self._zstd.decompress(frame)
                    except self._zstd.ZstdError:
                        pass
                    else:
                        return found
            place = found + 1
        return None

    def _find(self, place: int) -> int | None:
        """Where a frame may begin, from `place` on."""
        kept = b""
        self._file.seek(place)
        while more := self._file.read(1 << 20):
            kept += more
            at: int = kept.find(ZSTD_MAGIC)
            if at >= 0:
                return place + at
            place, kept = place + len(kept) - 3, kept[-3:]
        return None

    def _frame(self, start: int, steps: int = MAX_BLOCK) -> tuple[bytes | None, str]:
        """The zstd frame that begins here. None at the end, at the index, and, with the reason, if it is not whole.

        Its blocks are walked (RFC 8878, section 3.1.1), so that nothing is decompressed before its size is known.
        steps: the most of them.
        """
        self._file.seek(start)
        head = self._file.read(18)
        if not head or head[:4] == _INDEX:
            return None, f"it has no end: {TORN}" if not self._complete and self._is_left() else ""
        torn = f"it ends in the midst of a block: {TORN}"
        if self._complete:
            torn = f"the block at byte {start} is damaged; the rest is left out"
        try:
            frame = self._zstd.get_frame_parameters(head)
            if frame.content_size > MAX_BLOCK:  # or unknown
                return None, f"{frame.content_size} bytes in the block at byte {start}; it ends here"
            place, last = start + self._zstd.frame_header_size(head), False
        except self._zstd.ZstdError as error:
            return None, torn if len(head) < 18 else f"damaged at byte {start}: {error}; the rest is left out"
        end = self._file.seek(0, os.SEEK_END)
        while not last and place + 3 <= end and steps:
            self._file.seek(place)
            described = int.from_bytes(self._file.read(3), "little")
            last, repeated = bool(described & 1), described >> 1 & 3 == 1
            place += 3 + (1 if repeated else described >> 3)
            steps -= 1
        place += 4 * frame.has_checksum
        if not last or place > end:
            return None, torn
        self._file.seek(start)
        whole: bytes = self._file.read(place - start)
        return whole, ""

    def _is_left(self) -> bool:
        """Whether it is one of this release whose writer is gone. Of others it is not known how they end."""
        return self.header.minor == MINOR and isinstance(self._path, Path) and is_held(self._path) is False
