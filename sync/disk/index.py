"""The files of a version's folder, computed from its manifest. Needs no torch.

`rolloutmq.json` has the manifest (names, dtypes, shapes, digests) and a SHA-256 over itself. The manifest and the
number of tensors per file determine which tensor is in which safetensors file, the headers of these files, and
`model.safetensors.index.json`. So a reader does not parse those: it computes them and compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...messages.errors import InvalidField
from ...messages.model import TensorSpec, WeightManifest, as_invalid_field
from .errors import BrokenSnapshot
from .folder import INDEX

FORMAT = 1
WEIGHT_MAP = "model.safetensors.index.json"
"""The file in which loaders look up where a tensor is."""
MAX_INDEX_BYTES = 256 << 20
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1),
    "complex64": ("C64", 8),
}
"""torch's name -> the name in safetensors, and bytes per element."""
_BESIDE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")


class FileEntry(BaseModel):
    """A safetensors file. tensors: how many of the manifest's it has, in order. nbytes: its size on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    nbytes: int = Field(ge=0)
    tensors: int = Field(ge=1)


class Beside(BaseModel):
    """A configuration or tokenizer file. With these, any loader can read the folder as a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    nbytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class SnapshotIndex(BaseModel):
    """rolloutmq.json.

    created: UTC by the writer's clock, for people. libraries: name -> version, of the writer. nonfinite: names of
        tensors with NaN or Inf. beside: configuration and tokenizer files.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    created: str = Field(max_length=64)
    libraries: dict[str, str]
    manifest: WeightManifest
    nonfinite: tuple[str, ...] = ()
    files: tuple[FileEntry, ...]
    beside: tuple[Beside, ...] = ()

    def to_bytes(self) -> bytes:
        """Encode it as it is written to disk."""
        raw = self.model_dump(mode="json")
        return json.dumps(raw | {"sha256": _digest(raw)}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> SnapshotIndex:
        """Decode it. Raises BrokenSnapshot if `to_bytes` has not written it, or its parts contradict each other."""
        try:
            raw = json.loads(content)
            if not isinstance(raw, dict):
                raise ValueError("not an object")
            if raw.get("format") != FORMAT:
                raise ValueError(f"format {str(raw.get('format'))[:20]}, this version of rolloutmq reads {FORMAT}")
            if raw.pop("sha256", None) != _digest(raw):
                raise ValueError("its sha256 does not match its contents")
            index = cls.model_validate(raw)
            index.shards()
            for beside in index.beside:
                if not _BESIDE.fullmatch(beside.name) or is_ours(beside.name):
                    raise InvalidField("beside", beside.name, "the name of a file in this folder")
        except ValidationError as error:
            raise BrokenSnapshot(f"{INDEX}: {as_invalid_field(error)}") from None
        except (ValueError, RecursionError, InvalidField) as error:
            raise BrokenSnapshot(f"{INDEX}: {error}") from None
        return index

    def shards(self) -> tuple[Shard, ...]:
        """Compute the files. Raises InvalidField if `files` says otherwise."""
        shards = split(self.manifest, [entry.tensors for entry in self.files])
        for shard, entry in zip(shards, self.files, strict=True):
            if (shard.name, shard.nbytes) != (entry.name, entry.nbytes):
                raise InvalidField("files", (entry.name, entry.nbytes), f"{shard.name} with {shard.nbytes} bytes")
        return shards


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file. specs: in the order of their bytes. starts: name -> first byte in the file."""

    name: str
    specs: tuple[TensorSpec, ...]
    header: bytes
    starts: dict[str, int]
    nbytes: int


def counts(manifest: WeightManifest, file_bytes: int) -> list[int]:
    """Divide the tensors into files of at most `file_bytes`; a larger tensor has a file for itself. Returns counts."""
    found: list[int] = []
    size = 0
    for spec in manifest.tensors:
        if found and size + spec.nbytes <= file_bytes:
            found[-1] += 1
            size += spec.nbytes
        else:
            found.append(1)
            size = spec.nbytes
    return found


def split(manifest: WeightManifest, tensors_per_file: Sequence[int]) -> tuple[Shard, ...]:
    """Compute the files of a manifest. Raises InvalidField for tensors that safetensors cannot hold."""
    if sum(tensors_per_file) != len(manifest.tensors) or not manifest.tensors:
        raise InvalidField("files", f"{sum(tensors_per_file)} tensors", f"the manifest's {len(manifest.tensors)}")
    names = {spec.name for spec in manifest.tensors}
    if len(names) < len(manifest.tensors) or "__metadata__" in names:
        raise InvalidField("tensors", "names", "every name once, none of them __metadata__")
    shards, first = [], 0
    for number, count in enumerate(tensors_per_file, 1):
        name = f"model-{number:05d}-of-{len(tensors_per_file):05d}.safetensors"
        shards.append(_shard(name, manifest.tensors[first : first + count]))
        first += count
    return tuple(shards)


def _shard(name: str, tensors: Sequence[TensorSpec]) -> Shard:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    specs = sorted(tensors, key=lambda spec: -_itemsize(spec))  # wide ones first, so that all are aligned
    places, place = {}, 0
    for spec in specs:
        header[spec.name] = {
            "dtype": DTYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [place, place + spec.nbytes],
        }
        places[spec.name] = place
        place += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    return Shard(name, tuple(specs), text, {key: at + len(text) for key, at in places.items()}, len(text) + place)


def _itemsize(spec: TensorSpec) -> int:
    if spec.dtype not in DTYPES:
        raise InvalidField(f"{spec.name}.dtype", spec.dtype, f"what safetensors holds: {', '.join(DTYPES)}")
    itemsize = DTYPES[spec.dtype][1]
    if math.prod(spec.shape) * itemsize != spec.nbytes:
        raise InvalidField(f"{spec.name}.nbytes", spec.nbytes, f"{spec.dtype} of shape {list(spec.shape)}")
    return itemsize


def weight_map(manifest: WeightManifest, shards: Sequence[Shard]) -> bytes:
    """Return the contents of model.safetensors.index.json."""
    files = {spec.name: shard.name for shard in shards for spec in shard.specs}
    return json.dumps({"metadata": {"total_size": manifest.nbytes}, "weight_map": files}, indent=1).encode()


def is_ours(name: str) -> bool:
    """Whether a snapshot writes a file of this name itself."""
    return name in (INDEX, WEIGHT_MAP) or name.endswith(".safetensors")


def same_tensors(one: WeightManifest, other: WeightManifest) -> bool:
    """Whether two manifests describe the same version with the same bits, in whatever buckets."""

    def contents(manifest: WeightManifest) -> dict[str, Any]:
        return {spec.name: (spec.dtype, spec.shape, spec.digest) for spec in manifest.tensors}

    return one.version == other.version and contents(one) == contents(other)


def _digest(raw: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
