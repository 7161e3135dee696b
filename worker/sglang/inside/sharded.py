"""SGLang's sharded states: every rank's own parameters in files of its own, in the engine's names.

The files have the format of SGLang's ShardedStateLoader, so `load_format="sharded_state"` starts an engine from them.
This module writes and reads them itself, so that they have digests and are checked before a byte of the model is
written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ....messages.errors import DigestMismatch, EngineError
from ....sync.disk import BrokenSnapshot, NoSuchSnapshot, disk_errors
from ....sync.tensors import digest, digests, hex_of

FILE_BYTES = 5 << 30


def _names(rank: int) -> str:
    return f"model-rank-{rank}-part-{{part}}.safetensors"


def _sidecar(path: Path, rank: int) -> Path:
    return path / f"rolloutmq-rank-{rank}.json"


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank saves: its state, without tensors that share another one's memory."""
    from sglang.srt.model_loader.loader import ShardedStateLoader  # noqa: PLC0415 – only where an engine runs

    kept: dict[str, torch.Tensor] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return kept


def save(model: Any, path: Path, rank: int, version: int) -> dict[str, Any]:
    """Write one rank's files and their digests. Nothing may change the weights meanwhile. Raises SnapshotError."""
    from safetensors.torch import save_file  # noqa: PLC0415

    with disk_errors("writing", path):
        path.mkdir(parents=True, exist_ok=True)
        part: dict[str, torch.Tensor] = {}
        files: list[str] = []
        told: dict[str, str] = {}

        def write() -> None:
            if part:
                name = _names(rank).format(part=len(files))
                save_file(part, path / name)
                files.append(name)
                part.clear()

        size = 0
        for name, tensor in own_tensors(model).items():
            if part and size + tensor.nbytes > FILE_BYTES:
                write()
                size = 0
            part[name] = tensor.contiguous()
            told[name] = digest(tensor)
            size += tensor.nbytes
        write()
        index = {"version": version, "rank": rank, "digests": told}
        _sidecar(path, rank).write_text(json.dumps(index, separators=(",", ":")))
    return {"path": str(path), "files": files, "tensors": len(told)}


class Shards:
    """One rank's files, opened for a model. Raises NoSuchSnapshot, BrokenSnapshot."""

    def __init__(self, model: Any, path: Path, rank: int) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        self._model, self._path = model, path
        found = sorted(path.glob(_names(rank).format(part="*")))
        if not found:
            raise NoSuchSnapshot(f"{path} has no file of rank {rank}")
        try:
            self._files: list[Any] = [safe_open(file, framework="pt") for file in found]
        except SafetensorError as error:
            raise BrokenSnapshot(f"{path}: {error}") from error
        self._file_of: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._digests: dict[str, str] = {}
        sidecar = _sidecar(path, rank)
        if sidecar.is_file():
            with disk_errors("reading", sidecar):
                try:
                    self._digests = dict(json.loads(sidecar.read_bytes())["digests"])
                except (ValueError, KeyError, TypeError) as error:
                    raise BrokenSnapshot(f"{sidecar}: {error}") from None

    def check(self) -> int:
        """Check names, shapes, dtypes, and digests if there are some. Returns the number of tensors.

        Raises DigestMismatch.
        """
        targets = own_tensors(self._model)
        strange, missing = self._file_of.keys() - targets.keys(), targets.keys() - self._file_of.keys()
        if strange or missing:
            kinds = (("unknown", strange), ("missing", missing))
            what = [f"{kind} {sorted(names)[:3]}" for kind, names in kinds if names]
            raise DigestMismatch(f"{self._path} is of another engine: {', '.join(what)}")
        for name, target in targets.items():
            tensor = self._file_of[name].get_tensor(name)
            if (tensor.dtype, tensor.shape) != (target.dtype, target.shape):
                found, wanted = (f"{each.dtype} {tuple(each.shape)}" for each in (tensor, target))
                raise DigestMismatch(f"tensor {name}: {found} in {self._path}, the engine's is {wanted}")
            if self._digests and self._digests.get(name) != digest(tensor):
                raise DigestMismatch(f"tensor {name} in {self._path} is not as it was saved")
        return len(targets)

    def load(self) -> int:
        """Copy every tensor into the model, and read it back. Raises EngineError if one then differs from the file."""
        targets = own_tensors(self._model)
        for name, target in targets.items():
            target.copy_(self._file_of[name].get_tensor(name))
        held = hex_of(digests(list(targets.values())))
        for name, value in zip(targets, held, strict=True):
            if value != digest(self._file_of[name].get_tensor(name)):
                raise EngineError(f"tensor {name}: the engine does not hold what is in {self._path}")
        return len(targets)

    def close(self) -> None:
        """Close the files."""
        self._files, self._file_of = [], {}
