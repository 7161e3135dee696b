"""A segment: one file of a journal. Any `zstd -d` turns it into a stream of msgpack values.

    frame 0     a zstd frame with a map: {"format": "rolloutmq-journal", "major", "minor", "writer", "number", "at"}
    frame 1…    a zstd frame each, with an array of entries (see `Entry.pack`)
    the last    a skippable frame with the index, as soon as the segment is complete: see `Index`

Every zstd frame has its size and a checksum. A writer that dies leaves a file that ends in the midst of a frame, or
after one: what is before it is whole. A segment is never written to again by another process. Several segments may be
merged into a new one (merge.py), whose header names them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgpack
import numpy as np
import numpy.typing as npt
from msgpack.exceptions import UnpackException

from ..errors import ConfigError, MalformedMessage, MessageError, UnsupportedVersion
from .entry import Entry, Record

MERGED = "merged"
"""The writer of a segment that others were merged into has a name that begins so."""
FORMAT, MAJOR, MINOR = "rolloutmq-journal", 1, 1
SUFFIX = ".journal.zst"
LEVEL = 1
"""zstd's fast one. Level 3 takes twice the time, and token ids with their log-probabilities become no smaller."""
MAX_BLOCK = 256 << 20
"""Bytes of a block without compression that a reader accepts."""
MAX_ELEMENTS = 1 << 21
"""Elements of lists and maps in a block that a reader accepts. An empty list is one byte there and 72 in memory.
Writers write less: one entry, which has entry.py's MAX_ELEMENTS at most, behind half a MiB of others."""
TORN = "it ends in the midst of a block, as its writer died or still writes; all before that is whole"
_INDEX_MAGIC = 0x184D2A5A  # one of the sixteen that zstd skips
_INDEX_HEAD = struct.Struct("<II")  # magic, length
_INDEX_TAIL = struct.Struct("<I8s")  # length again, for whoever begins at the end
_TAIL = b"rmqindex"


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a segment. writer: an id of the process. number: of the segment, from 0. at: when it began.

    replaces: names of the segments that were merged into this one. While they are still there, readers leave them out.
    """

    writer: str
    number: int
    at: float
    replaces: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's. Names sort by time, then by writer."""
        return f"{int(self.at * 1000):014d}-{self.writer}-{self.number:06d}{SUFFIX}"

    def pack(self) -> dict[str, Any]:
        told = {"writer": self.writer, "number": self.number, "at": self.at}
        replaces = {"replaces": list(self.replaces)} if self.replaces else {}
        return {"format": FORMAT, "major": MAJOR, "minor": MINOR} | told | replaces

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
        return cls(writer, number, at, tuple(replaces)), minor > MINOR


def _is_ours(name: str) -> bool:
    """Whether it can be the name of a segment in this folder: what is replaced is deleted."""
    return name.endswith(SUFFIX) and not {"/", "\0"}.intersection(name) and len(name.encode()) <= 255


@dataclass(frozen=True, slots=True)
class Index:
    """Where what is in a segment.

    offsets: (b,) int64, where each block begins. firsts, lasts: (b,) float64, times of its entries. jobs: (k,) uint64,
    hashes of job ids (`hashes_of`), ascending. blocks: (k,) int32, the block that each of them is in.
    """

    offsets: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.float64]
    lasts: npt.NDArray[np.float64]
    jobs: npt.NDArray[np.uint64]
    blocks: npt.NDArray[np.int32]

    def blocks_of(self, job_ids: frozenset[str]) -> list[int]:
        """Numbers of the blocks in which entries of these jobs may be."""
        found: set[int] = set()
        for of_job in hashes_of(job_ids):
            left, right = np.searchsorted(self.jobs, of_job, "left"), np.searchsorted(self.jobs, of_job, "right")
            found.update(map(int, self.blocks[left:right]))
        return sorted(found)

    def pack(self) -> bytes:
        """The skippable frame."""
        body: bytes = msgpack.packb({_NAMES.get(name, name): getattr(self, name).tobytes() for name in _ARRAYS})
        size = len(body) + _INDEX_TAIL.size
        return _INDEX_HEAD.pack(_INDEX_MAGIC, size) + body + _INDEX_TAIL.pack(len(body), _TAIL)

    @classmethod
    def read(cls, file: BufferedReader) -> Self | None:
        """The index at the end of a file; None if there is none, or it is damaged."""
        size = file.seek(0, os.SEEK_END)
        if size < _INDEX_TAIL.size:
            return None
        file.seek(size - _INDEX_TAIL.size)
        length, tail = _INDEX_TAIL.unpack(file.read(_INDEX_TAIL.size))
        if tail != _TAIL or length > size - _INDEX_TAIL.size:
            return None
        file.seek(size - _INDEX_TAIL.size - length)
        try:
            packed = msgpack.unpackb(file.read(length))
            made = cls(**{name: np.frombuffer(packed[_NAMES.get(name, name)], kind) for name, kind in _ARRAYS.items()})
        except (ValueError, TypeError, KeyError, UnpackException):
            return None
        blocks, jobs = len(made.offsets), len(made.jobs)
        whole = len(made.firsts) == len(made.lasts) == blocks and len(made.blocks) == jobs
        inside = not jobs or (made.blocks.min() >= 0 and made.blocks.max() < blocks)
        there = not blocks or (made.offsets.min() >= 0 and made.offsets.max() < size)
        return made if whole and inside and there else None


_ARRAYS: dict[str, Any] = {
    "offsets": np.int64, "firsts": np.float64, "lasts": np.float64, "jobs": np.uint64, "blocks": np.int32,
}  # fmt: skip
_NAMES = {"jobs": "ids"}
"""What an array is called in the file. Minor version 0 had other hashes, as `jobs`: each side reads the segments of the
other without their index."""


_HEX_ID = re.compile("[0-9a-fA-F]{32}")


def hashes_of(job_ids: Collection[str]) -> npt.NDArray[np.uint64]:
    """(n,) uint64, the same in every process. Two ids with the same hash cost a look into a block.

    Of an id as `new_id` makes it, 32 hex digits, the second half is as good as a hash. Others get a real one.
    """
    try:
        halves = np.frombuffer(bytes.fromhex("".join(job_ids)), ">u8").reshape(-1, 2)
        if len(halves) == len(job_ids) and {32}.issuperset(map(len, job_ids)):
            return halves[:, 1].astype(np.uint64)
    except ValueError:
        pass
    return np.array([_hash(job_id) for job_id in job_ids], np.uint64)


def _hash(job_id: str) -> int:
    if _HEX_ID.fullmatch(job_id):
        return int(job_id[16:], 16)
    return int.from_bytes(hashlib.blake2b(job_id.encode(), digest_size=8).digest(), "little")


def zstd() -> Any:
    """The module zstandard: a trainer that keeps no journal does without. Raises ConfigError."""
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"a journal needs zstandard ({error}): pip install 'rolloutmq[journal]'") from None
    return zstandard


def is_left(path: Path) -> bool:
    """Whether the writer of a segment writes to it no more: its lock has ended, with the segment or the process."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


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
        with contextlib.suppress(OSError):  # a filesystem without locks: then no other process takes it for left
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._offsets: list[int] = []
        self._times: list[tuple[float, float]] = []
        self._jobs: list[npt.NDArray[np.uint64]] = []  # hashes of those in each block
        self._write(self._compress(msgpack.packb(header.pack())))

    def block(self, packed: Sequence[Packed]) -> None:
        """Write packed entries as one block."""
        head = msgpack.Packer().pack_array_header(sum(one.entries for one in packed))
        frame = self._compress(b"".join([head, *(one.data for one in packed)]))
        self._jobs.append(hashes_of({job_id for one in packed for job_id in one.job_ids}))
        self._offsets.append(self.nbytes)
        self._times.append((min(one.first for one in packed), max(one.last for one in packed)))
        self._write(frame)

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
        self._file = path.open("rb")
        try:
            first = next(self._values(0), None)
            if first is None:
                raise MalformedMessage("a segment without a header: its writer died as it began")
            self.header, newer = Header.unpack(first)
        except BaseException:
            self._file.close()
            raise
        if newer:
            problem(f"{path}: a newer minor version wrote it; what is unknown here is left out")
        self.index = Index.read(self._file)

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
        """What is in the frames from here on, until the end, the index, or a frame that is not whole."""
        self._file.seek(offset)
        while (frame := self._frame()) is not None:
            try:
                yield _unpack(self._zstd.decompress(frame))
            except (ValueError, TypeError, RecursionError, UnpackException, self._zstd.ZstdError) as error:
                self._problem(f"{self._path}: a block is damaged and left out: {error or type(error).__name__}")
            if only_one:
                return

    def _frame(self) -> bytes | None:
        """The zstd frame that begins here; None at the end, at the index, and for one that is torn or damaged.

        Its blocks are walked (RFC 8878, section 3.1.1), so that nothing is decompressed before its size is known.
        """
        start = self._file.tell()
        head = self._file.read(18)
        if not head or head[:4] == _INDEX_MAGIC.to_bytes(4, "little"):
            return None
        try:
            frame = self._zstd.get_frame_parameters(head)
            if frame.content_size > MAX_BLOCK:  # or unknown
                self._problem(f"{self._path}: {frame.content_size} bytes in the block at byte {start}; it ends here")
                return None
            place, last = start + self._zstd.frame_header_size(head), False
        except self._zstd.ZstdError as error:
            torn = len(head) < 18
            self._problem(
                f"{self._path}: {TORN if torn else f'damaged at byte {start}: {error}; the rest is left out'}"
            )
            return None
        end = self._file.seek(0, os.SEEK_END)
        while not last and place + 3 <= end:
            self._file.seek(place)
            described = int.from_bytes(self._file.read(3), "little")
            last, repeated = bool(described & 1), described >> 1 & 3 == 1
            place += 3 + (1 if repeated else described >> 3)
        place += 4 * frame.has_checksum
        if not last or place > end:
            self._problem(f"{self._path}: {TORN}")
            return None
        self._file.seek(start)
        whole: bytes = self._file.read(place - start)
        return whole
