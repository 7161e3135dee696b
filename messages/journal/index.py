"""The index at the end of a complete segment: where its blocks are, their times, and which jobs they have."""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, Self

import msgpack
import numpy as np
import numpy.typing as npt
from msgpack.exceptions import UnpackException

INDEX_MAGIC = 0x184D2A5A  # one of the sixteen that zstd skips
_HEAD = struct.Struct("<II")  # magic, length
_TAIL = struct.Struct("<I8s")  # length again, for whoever begins at the end
_ENDS = b"rmqindex"


@dataclass(frozen=True, slots=True)
class Index:
    """Where what is in a segment.

    offsets: (b,) int64, where each block begins. firsts, lasts: (b,) float64, times of its entries. ids: (k,) uint64,
    hashes of job ids (`hashes_of`), ascending. blocks: (k,) int32, the block that each of them is in.
    """

    offsets: npt.NDArray[np.int64]
    firsts: npt.NDArray[np.float64]
    lasts: npt.NDArray[np.float64]
    ids: npt.NDArray[np.uint64]
    blocks: npt.NDArray[np.int32]

    def blocks_of(self, job_ids: frozenset[str]) -> list[int]:
        """Numbers of the blocks in which entries of these jobs may be."""
        found: set[int] = set()
        for of_job in hashes_of(job_ids):
            left, right = np.searchsorted(self.ids, of_job, "left"), np.searchsorted(self.ids, of_job, "right")
            found.update(map(int, self.blocks[left:right]))
        return sorted(found)

    def pack(self) -> bytes:
        """The skippable frame."""
        arrays = {name: getattr(self, name).tobytes() for name in _ARRAYS}
        body: bytes = msgpack.packb(arrays | {"sum": _sum(arrays)})
        size = len(body) + _TAIL.size
        return _HEAD.pack(INDEX_MAGIC, size) + body + _TAIL.pack(len(body), _ENDS)

    @classmethod
    def read(cls, file: BufferedReader) -> Self | None:
        """The index at the end of a file; None if there is none, or it is damaged."""
        length, size = cls.length(file), file.tell()
        if length is None:
            return None
        file.seek(max(0, size - _TAIL.size - length))
        try:
            packed = msgpack.unpackb(file.read(length))
            if packed["sum"] != _sum({name: packed[name] for name in _ARRAYS}):
                return None
            made = cls(**{name: np.frombuffer(packed[name], kind) for name, kind in _ARRAYS.items()})
        except (ValueError, TypeError, KeyError, UnpackException):
            return None
        blocks, ids = len(made.offsets), len(made.ids)
        whole = len(made.firsts) == len(made.lasts) == blocks and len(made.blocks) == ids
        inside = not ids or (made.blocks.min() >= 0 and made.blocks.max() < blocks)
        there = not blocks or (made.offsets.min() >= 0 and made.offsets.max() < size)
        return made if whole and inside and there else None

    @staticmethod
    def length(file: BufferedReader) -> int | None:
        """How long the index at the end of a file says it is; None if the file does not end with one."""
        size = file.seek(0, os.SEEK_END)
        if size < _TAIL.size:
            return None
        file.seek(size - _TAIL.size)
        length, tail = _TAIL.unpack(file.read(_TAIL.size))
        return int(length) if tail == _ENDS else None


def _sum(arrays: dict[str, bytes]) -> bytes:
    return hashlib.blake2b(b"".join(arrays.values()), digest_size=8).digest()


_ARRAYS: dict[str, Any] = {
    "offsets": np.int64, "firsts": np.float64, "lasts": np.float64, "ids": np.uint64, "blocks": np.int32,
}  # fmt: skip
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
