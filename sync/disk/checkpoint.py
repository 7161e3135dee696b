"""A plain safetensors checkpoint, read as a version.

A `DiskVersion` has its digests from the trainer. Here digests are computed when the folder is opened, so they only say
that every tensor arrives in the engine as it was in the file. A tensor that changes while it is read is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import SafetensorError, safe_open

from ...messages.errors import DigestMismatch, InvalidField
from ...messages.model import BUCKET_BYTES, TensorSpec, WeightManifest
from ..tensors import PlacePlanner, digest, hex_of, look
from .errors import BrokenSnapshot, NoSuchSnapshot, disk_errors
from .folder import INDEX, VERSION_FOLDER
from .index import DTYPES, WEIGHT_MAP

CheckpointFormat = Literal["snapshot", "snapshots", "safetensors", "sharded"]
SHARD = re.compile(r"model-rank-[0-9]+-part-[0-9]+\.safetensors|rolloutmq-rank-[0-9]+\.json")
"""Files of a sharded state: SGLang's own, by their usual names, and what a worker writes beside its own."""
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt"})


@cache
def checkpoint_tensors(model: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Read dtypes and shapes of a local safetensors checkpoint, by name. Empty if `model` is not such a folder."""
    names = {theirs: ours for ours, (theirs, _) in DTYPES.items()}
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in Path(model).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 – it is no mapping
                tensor = tensors.get_slice(name)
                found[name] = names.get(tensor.get_dtype(), ""), tuple(tensor.get_shape())
    return found


def checkpoint_shapes(model: str) -> Mapping[str, tuple[int, ...]]:
    """Read only the shapes."""
    return {name: shape for name, (_, shape) in checkpoint_tensors(model).items()}


def checkpoint_format(path: str | Path) -> CheckpointFormat:
    """Tell what a folder holds: one version of a SnapshotStore, a whole store, a checkpoint, or a sharded state.

    Raises NoSuchSnapshot if there is no such folder, InvalidField if nothing in it can be loaded.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise NoSuchSnapshot(f"{folder} is not a folder on this host")
    with disk_errors("listing", folder):
        names = [entry.name for entry in folder.iterdir()]
    if INDEX in names:
        if not VERSION_FOLDER.fullmatch(folder.resolve().name):
            raise InvalidField("path", str(folder), f"a name like v000000000012, because it has a {INDEX}")
        return "snapshot"
    if any(SHARD.fullmatch(name) for name in names):
        return "sharded"
    if any(name.endswith(".safetensors") for name in names):
        return "safetensors"
    if any(VERSION_FOLDER.fullmatch(name) for name in names):
        return "snapshots"
    if pickled := sorted(name for name in names if Path(name).suffix in _PICKLED):
        raise InvalidField("path", str(folder), f"safetensors files; {pickled[0]} may be a pickle, which is not read")
    raise InvalidField("path", str(folder), "a snapshot, a safetensors checkpoint, or a sharded state of SGLang's")


class Checkpoint:
    """A checkpoint that can be read any number of times. It has the attributes of a `DiskVersion`.

    manifest: names and dtypes as in the files, buckets as a trainer would make them. Opening reads every file once.
    """

    def __init__(self, path: Path, version: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Raises NoSuchSnapshot, BrokenSnapshot, InvalidField, and DigestMismatch for a tensor with NaN or Inf."""
        self.path, self.version = path, version
        self._file_of = _files(path)
        planner, specs, self.nbytes = PlacePlanner(bucket_bytes, None), [], 0
        for name, tensor in self._tensors():
            specs.append(planner.place(name, tensor).spec(_finite_digest(name, tensor)))
            self.nbytes += tensor.nbytes
        sizes = planner.done().sizes
        self.manifest = WeightManifest.build(version=version, bucket_nbytes=sizes, tensors=tuple(specs))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        by_file: dict[str, list[str]] = {}
        for name, file in self._file_of.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            with disk_errors("reading", self.path / file):
                try:
                    with safe_open(self.path / file, framework="pt") as opened:
                        for name in names:
                            yield name, opened.get_tensor(name)
                except SafetensorError as error:
                    raise BrokenSnapshot(f"{self.path / file}: {error}") from error

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Yield each tensor, in the manifest's order. Raises DigestMismatch if one has changed since the opening."""
        for spec, (name, tensor) in zip(self.manifest.tensors, self._tensors(), strict=True):
            if (spec.name, spec.digest) != (name, digest(tensor)):
                file = self.path / self._file_of[name]
                raise DigestMismatch(f"tensor {name} in {file} has changed since it was opened")
            yield spec, tensor

    def close(self) -> None:
        """Do nothing: no file stays open between readings."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _files(path: Path) -> dict[str, str]:
    """Map each tensor to its file, from the index if there is one, else from the files' headers."""
    index = path / WEIGHT_MAP
    with disk_errors("reading", index):
        if index.is_file():
            try:
                told = dict(json.loads(index.read_bytes())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise BrokenSnapshot(f"{index}: not a map of tensors to files: {error}") from None
            for file in set(map(str, told.values())):
                if "/" in file or not (path / file).is_file():
                    raise BrokenSnapshot(f"{index}: names {file}, which is not beside it")
            return {str(name): str(file) for name, file in told.items()}
        found: dict[str, str] = {}
        for each in sorted(path.glob("*.safetensors")):
            try:
                with safe_open(each, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 – it is no mapping
                        if name in found:
                            raise BrokenSnapshot(f"{name} is in {found[name]} and in {each.name}")
                        found[name] = each.name
            except SafetensorError as error:
                raise BrokenSnapshot(f"{each}: {error}") from error
    if not found:
        raise NoSuchSnapshot(f"no tensors in {path}")
    return found


def _finite_digest(name: str, tensor: torch.Tensor) -> str:
    value, bad = look([tensor.contiguous()])
    if int(bad):
        raise DigestMismatch(f"tensor {name}: has NaN or Inf in it")
    return hex_of(value)[0]
