"""Writes a version's files from buckets on any device, chunk by chunk, and flushes them to disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ...messages.errors import InvalidField
from ..tensors import Snapshot, check_places
from .folder import Draft
from .index import WEIGHT_MAP, Beside, FileEntry, Shard, SnapshotIndex, counts, is_ours, split, weight_map

CHUNK = 64 << 20
"""Bytes of host memory through which a GPU's tensors go to disk."""
_BESIDE = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".py"})


def write_version(draft: Draft, snapshot: Snapshot, base: Path | None, file_bytes: int) -> None:
    """Write all files of a version into its draft, the index last. Raises OSError, and InvalidField for a dtype."""
    manifest = snapshot.manifest
    check_places(manifest)
    shards = split(manifest, counts(manifest, file_bytes))
    beside = tuple(_copy(path, draft.path) for path in beside_weights(base)) if base else ()
    chunks = _chunks_from(snapshot.device)
    for shard in shards:
        _write(draft.path / shard.name, partial(_write_shard, shard, snapshot, chunks))
    _write(draft.path / WEIGHT_MAP, lambda put: put(weight_map(manifest, shards)))
    index = SnapshotIndex(
        created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        libraries=_libraries(),
        manifest=manifest,
        nonfinite=snapshot.nonfinite,
        files=tuple(FileEntry(name=s.name, nbytes=s.nbytes, tensors=len(s.specs)) for s in shards),
        beside=beside,
    )
    draft.write_index(index.to_bytes())


def beside_weights(base: Path) -> list[Path]:
    """Find configuration and tokenizer files of a model's folder. Raises InvalidField if there is no such folder."""
    if not base.is_dir():
        raise InvalidField("base", str(base), "a model's folder, with config.json and tokenizer files")
    return [
        path
        for path in sorted(base.iterdir())
        if path.suffix in _BESIDE
        and path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
        and not is_ours(path.name)
    ]


Put = Callable[[Any], None]
Chunks = Callable[[torch.Tensor], Iterator[memoryview]]


def _write(path: Path, fill: Callable[[Put], None]) -> None:
    """Write a new file and flush it to disk. `fill` gets a function that appends bytes."""
    with open(path, "xb", buffering=0) as file:

        def put(content: Any) -> None:
            left = memoryview(content)
            while left:
                left = left[file.write(left) or 0 :]

        fill(put)
        os.fsync(file.fileno())


def _write_shard(shard: Shard, snapshot: Snapshot, chunks: Chunks, put: Put) -> None:
    put(shard.header)
    for spec in shard.specs:
        for chunk in chunks(snapshot.buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]):
            put(chunk)


def _chunks_from(device: torch.device) -> Chunks:
    """Return what yields the bytes of flat uint8 tensors there. A chunk is valid until the next one is asked for.

    A GPU's go through one pinned buffer, on a stream of its own.
    """
    if device.type == "cpu":
        return lambda flat: iter((memoryview(flat.numpy()),))
    pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the buckets' filling may still be queued

    def chunks(flat: torch.Tensor) -> Iterator[memoryview]:
        for piece in flat.split(CHUNK):
            with torch.cuda.stream(stream):
                pinned[: piece.numel()].copy_(piece, non_blocking=True)
            stream.synchronize()
            yield memoryview(pinned[: piece.numel()].numpy())

    return chunks


def _copy(source: Path, folder: Path) -> Beside:
    """Copy a file. A link would change with its original."""
    target = folder / source.name
    shutil.copyfile(source, target)
    content = target.read_bytes()
    with open(target, "rb") as file:
        os.fsync(file.fileno())
    return Beside(name=source.name, nbytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _libraries() -> dict[str, str]:
    try:
        own = metadata.version("rolloutmq")
    except metadata.PackageNotFoundError:
        own = "unknown"
    return {"rolloutmq": own, "torch": torch.__version__, "python": sys.version.split()[0]}
