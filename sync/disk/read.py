"""Reading a version from disk: sizes and headers when it is opened, every tensor's digest when it is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ...messages.errors import DigestMismatch
from ...messages.model import TensorSpec, WeightManifest
from .errors import BrokenSnapshot, disk_errors
from .folder import INDEX
from .index import MAX_INDEX_BYTES, WEIGHT_MAP, Shard, SnapshotIndex, weight_map

if TYPE_CHECKING:
    import torch


class DiskVersion:
    """An opened version on disk. Nobody removes it until `close`.

    Opening compares sizes and headers with the manifest. Contents are verified as they are read. Files are opened
    inside the version's folder, never through a link. They are read and not mapped, because a mapped file that shrinks
    kills the process that reads it.

    Every method may raise BrokenSnapshot, DigestMismatch or SnapshotError.
    """

    def __init__(self, version: int, path: Path, held: AbstractContextManager[tuple[int, int]]) -> None:
        """Open the version. Needs no torch. Raises NoSuchSnapshot, or BrokenSnapshot if it is not a snapshot.

        held: gives file descriptors of the folder and of its index. `close` leaves it.
        """
        self.version, self.path = version, path
        with ExitStack() as stack:
            self._folder, index_fd = stack.enter_context(held)
            with disk_errors("reading", self.path):
                self.index = SnapshotIndex.from_bytes(_whole(index_fd, INDEX, MAX_INDEX_BYTES))
                if self.index.manifest.version != version:
                    raise BrokenSnapshot(f"{self.path}/{INDEX}: is about version {self.index.manifest.version}")
                self._shards = self.index.shards()
                self._files: dict[str, tuple[Shard, int]] = {}
                for shard in self._shards:
                    fd = self._open(shard.name, shard.nbytes)
                    stack.callback(os.close, fd)
                    if _read(fd, 0, len(shard.header), shard.name) != shard.header:
                        raise BrokenSnapshot(f"{shard.name}: its header does not match the manifest")
                    self._files |= {spec.name: (shard, fd) for spec in shard.specs}
            self._stack = stack.pop_all()

    @property
    def manifest(self) -> WeightManifest:
        """Names, dtypes, shapes and digests of the tensors, and the buckets they were sent in."""
        return self.index.manifest

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(shard.nbytes for shard in self._shards)

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield each tensor in host memory, in the manifest's order. Raises DigestMismatch with tensor and file."""
        import torch  # noqa: PLC0415  # an operator's machine may not have it

        for spec in self.manifest.tensors:
            flat = torch.empty(spec.nbytes, dtype=torch.uint8)
            self._fill(spec, flat)
            self._check(spec, flat)
            yield spec, flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def verify(self) -> None:
        """Read and compare every byte of tensors, weight map, configuration and tokenizer files."""
        content = weight_map(self.manifest, self._shards)
        if self._small(WEIGHT_MAP, len(content)) != content:
            raise BrokenSnapshot(f"{WEIGHT_MAP}: does not describe these files")
        for beside in self.index.beside:
            if hashlib.sha256(self._small(beside.name, beside.nbytes)).hexdigest() != beside.sha256:
                raise BrokenSnapshot(f"{beside.name}: its sha256 is not {beside.sha256}")
        for _ in self:
            pass

    def close(self) -> None:
        """Close the files. From now on the version may be removed."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str, nbytes: int) -> int:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=self._folder)
        except OSError as error:
            raise BrokenSnapshot(f"{self.path}/{name}: {error.strerror}") from error
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            os.close(fd)
            raise BrokenSnapshot(f"{self.path}/{name}: {found.st_size} bytes, should be a plain file of {nbytes}")
        return fd

    def _small(self, name: str, nbytes: int) -> bytes:
        with disk_errors("reading", self.path / name):
            fd = self._open(name, nbytes)
            try:
                return _read(fd, 0, nbytes, name)
            finally:
                os.close(fd)

    def _fill(self, spec: TensorSpec, flat: torch.Tensor) -> None:
        """flat: (spec.nbytes,) uint8 in host memory."""
        shard, fd = self._files[spec.name]
        with disk_errors("reading", self.path / shard.name):
            _read_into(fd, shard.starts[spec.name], memoryview(flat.numpy()), shard.name)

    def _check(self, spec: TensorSpec, flat: torch.Tensor) -> None:
        from ..tensors import digest  # noqa: PLC0415

        found = digest(flat)
        if found != spec.digest:
            file = self.path / self._files[spec.name][0].name
            raise DigestMismatch(f"tensor {spec.name} in {file}: digest {found}, the trainer wrote {spec.digest}")


def _whole(fd: int, name: str, limit: int) -> bytes:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_size > limit:
        raise BrokenSnapshot(f"{name}: {found.st_size} bytes, should be a plain file of at most {limit}")
    return _read(fd, 0, found.st_size, name)


def _read(fd: int, start: int, nbytes: int, name: str) -> bytes:
    content = bytearray(nbytes)
    _read_into(fd, start, memoryview(content), name)
    return bytes(content)


def _read_into(fd: int, start: int, target: memoryview, name: str) -> None:
    while target:
        count = os.preadv(fd, [target], start)
        if not count:
            raise BrokenSnapshot(f"{name}: ends before byte {start + 1}")
        target, start = target[count:], start + count
