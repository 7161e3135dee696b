"""SGLang's sharded states: every rank's own parameters in files of its own, in the engine's names.

The files have the format of SGLang's ShardedStateLoader, so `load_format="sharded_state"` starts an engine from them.
This module writes and reads them itself, so that they have digests and are checked before a byte of the model is
written. `pieces` and `joined` make whole tensors of what tensor-parallel ranks hold, under the checkpoint's names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ....messages.errors import DigestMismatch, EngineError
from ....messages.model import TensorSpec, file_names
from ....sync.disk import FILE_BYTES, BrokenSnapshot, NoSuchSnapshot, SnapshotError, disk_errors
from ....sync.disk.write import beside_weights
from ....sync.plan import CopyPlan, PlanImpossible
from ....sync.tensors import digest, digests, dtype_named, hex_of

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
Named = Iterable[tuple[str, torch.Tensor]]


def _sidecar(path: Path, rank: int) -> Path:
    return path / f"rolloutmq-rank-{rank}.json"


def _told(sidecar: Path) -> dict[str, Any]:
    """What was noted beside a rank's files; without a note, SGLang itself has saved them."""
    if not sidecar.is_file():
        return {"digests": {}, "pattern": PATTERN}
    with disk_errors("reading", sidecar):
        try:
            told = {"pattern": PATTERN} | json.loads(sidecar.read_bytes())
            return {"digests": dict(told["digests"]), "pattern": file_names(told["pattern"])}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenSnapshot(f"{sidecar}: {error}") from None


def _files(path: Path, pattern: str, rank: int) -> list[Path]:
    return sorted(path.glob(pattern.format(rank=rank, part="*")))


def own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a rank saves: its state, without tensors that share another one's memory."""
    from sglang.srt.model_loader.loader import ShardedStateLoader  # noqa: PLC0415 – only where an engine runs

    kept: dict[str, torch.Tensor] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return kept


def save(
    model: Any,
    path: Path,
    rank: int,
    version: int,
    *,
    base: str | None = None,
    pattern: str = PATTERN,
    max_size: int = FILE_BYTES,
) -> dict[str, Any]:
    """Write one rank's files and their digests. Nothing may change the weights meanwhile. Raises SnapshotError.

    base: folder of the configuration and the tokenizer. The first rank copies them, so that SGLang starts from `path`.
    pattern: names of the files, with {rank} and {part}. max_size: see `write`.
    """
    with disk_errors("writing", path):
        path.mkdir(parents=True, exist_ok=True)
        for stale in _files(path, _told(_sidecar(path, rank))["pattern"], rank):  # others may be fewer now
            stale.unlink()
        for file in beside_weights(Path(base)) if base and rank == 0 else ():
            shutil.copyfile(file, path / file.name)
        tensors = own_tensors(model)
        files = write(((name, tensor.contiguous()) for name, tensor in tensors.items()), path, rank, pattern, max_size)
        told = {name: digest(tensor) for name, tensor in tensors.items()}
        index = {"version": version, "rank": rank, "pattern": pattern, "digests": told}
        _sidecar(path, rank).write_text(json.dumps(index, separators=(",", ":")))
    return {"path": str(path), "files": files, "tensors": len(told)}


def write(tensors: Named, path: Path, rank: int, pattern: str = PATTERN, max_size: int = FILE_BYTES) -> list[str]:
    """Write files of at most `max_size` bytes of tensors, a larger tensor alone. Returns their names."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    parts: list[str] = []
    part: dict[str, torch.Tensor] = {}
    size = 0

    def close() -> None:
        if part:
            parts.append(pattern.format(rank=rank, part=len(parts)))
            file = path / parts[-1]
            try:
                save_file(part, file)
            except SafetensorError as error:
                raise SnapshotError(f"writing {file}: {error}") from error
            file.chmod(path.stat().st_mode & 0o666)  # its own is for this user alone
            part.clear()

    for name, tensor in tensors:
        if size + tensor.nbytes > max_size:
            close()
            size = 0
        part[name] = tensor
        size += tensor.nbytes
    close()
    return parts


def pieces(plan: CopyPlan | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank holds of the checkpoint: (name and place in the tensor, as JSON; a copy in host memory).

    Raises PlanImpossible for what is not held as it was sent.
    """
    if plan is None:
        raise PlanImpossible("how this engine loads its weights cannot be turned round")
    for some in (plan.copies, plan.superseded):
        for name, copies in some.items():
            for copy in copies:
                at, held = copy.source, copy.destination
                if not held.dtype == at.dtype == dtype_named(plan.specs[name].dtype):
                    raise PlanImpossible(f"the engine does not hold {name} as it was sent")
                yield json.dumps([name, at.offset, at.shape, at.stride]), held.detach().to("cpu", copy=True)


def joined(specs: Sequence[TensorSpec], folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors of the ranks' pieces, one at a time. Tensors of which no rank holds anything are left out.

    Raises PlanImpossible for a tensor of which a part is missing.
    """
    from safetensors import safe_open  # noqa: PLC0415

    found: dict[str, dict[str, Any]] = {}  # what several ranks hold has one key
    for file in sorted(folder.iterdir()):
        opened: Any = safe_open(file, framework="pt")
        for key in opened.keys():  # noqa: SIM118 – it is no mapping
            found.setdefault(json.loads(key)[0], {})[key] = opened
    for spec in specs:
        if spec.name in found:
            whole = torch.empty(spec.shape, dtype=dtype_named(spec.dtype))
            left = whole.numel()
            for key, file in found[spec.name].items():
                _, offset, shape, stride = json.loads(key)
                piece = file.get_tensor(key)
                if piece.dtype == whole.dtype:
                    whole.as_strided(shape, stride, offset).copy_(piece)
                    left -= piece.numel()
            if left:
                raise PlanImpossible(
                    f"the ranks do not hold {spec.name} whole and as it was sent; save it as 'sharded'"
                )
            yield spec.name, whole


class Shards:
    """One rank's files, opened for a model. Raises NoSuchSnapshot, BrokenSnapshot."""

    def __init__(self, model: Any, path: Path, rank: int) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        self._model, self._path = model, path
        told = _told(_sidecar(path, rank))
        self._digests: dict[str, str] = told["digests"]
        found = _files(path, told["pattern"], rank)
        if not found:
            raise NoSuchSnapshot(f"{path} has no file of rank {rank}: {told['pattern']}")
        try:
            self._files: list[Any] = [safe_open(file, framework="pt") for file in found]
        except SafetensorError as error:
            raise BrokenSnapshot(f"{path}: {error}") from error
        self._file_of: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

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
