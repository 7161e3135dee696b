"""An operator's operations on the weights, in SGLang's scheduler process.

Each operation runs in a thread of the control server, while requests run. The docstring of one that writes to the model
says so. It is called only when no request runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from ....messages.errors import DigestMismatch, EngineError, InvalidField, RolloutMQError, WeightSyncError, shortly
from ....messages.model import TensorSpec
from ....messages.nearest import nearest
from ....sync.disk import FILE_BYTES, SnapshotStore, disk_errors
from ....sync.disk.checkpoint import checkpoint_shapes
from ....sync.packing import PackedWeights
from ....sync.plan import CopyPlan
from ....sync.receive import Receiver, held_tensors
from ....sync.tensors import Snapshot, digests, dtype_name, hex_of, length_term, look, side_stream
from . import sharded
from .scheduler import current

KEEP_ALL = 1 << 30
"""Number of versions to keep in an operator's folder, where nothing is removed."""
IDLE_S = 10.0
MOST_VALUES = 1 << 20
"""Most values of a parameter that are shown."""
T = TypeVar("T")
_asleep: dict[str, str] = {}
"""Digests of the parameters when the weights went to sleep."""


class Inside:
    """One rank's answers. receiver: knows the version that this engine received last."""

    def __init__(self, receiver: Receiver, model_dir: str) -> None:
        self._receiver, self._model_dir = receiver, model_dir
        self._operations: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "audit": self._audit,
            "parameter": self._parameter,
            "export": self._export,
            "pieces": self._pieces,
            "save_sharded": self._save_sharded,
            "check_sharded": self._check_sharded,
            "load_sharded": self._load_sharded,
            "mark": self._mark,
            "unchanged": self._unchanged,
            "idle": self._idle,
            "synchronize": self._synchronize,
            "paused": self._paused,
            "buffers": self._buffers,
            "kv_use": self._kv_use,
            "generated": self._generated,
        }

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return {"ok": true, "result": …}, or {"ok": false} with "kind" and "error", or "invalid". Never raises."""
        try:
            with self._on_device(), torch.no_grad():
                return {"ok": True, "result": self._operations[str(question["operation"])](question)}
        except InvalidField as error:
            value = error.value if isinstance(error.value, int | str) else shortly(error.value)
            return {"ok": False, "invalid": [error.field, value, error.allowed]}
        except Exception as error:  # whatever torch or the disk raises belongs into the answer
            return {"ok": False, "kind": type(error).__name__, "error": str(error) or type(error).__name__}

    # --- looking ---------------------------------------------------------------------------------------------------

    def _audit(self, question: dict[str, Any]) -> dict[str, Any]:
        """Compare parameters with the trainer's digests, if the engine knows how they were loaded."""
        most, version = int(question["names"]), int(question["version"])
        with side_stream(self._receiver.device):
            parameters = _chosen(dict(_model().named_parameters()), question["only"])
            values, bad = _look(parameters)
            wrong, compared, why = ([], 0, "only") if question["only"] else self._compare(version)
            nonfinite = {name: parameters[name].float() for name, count in bad.items() if count}
            found = {
                "nan": [name for name, one in nonfinite.items() if one.isnan().any()],
                "inf": [name for name, one in nonfinite.items() if one.isinf().any()],
                "zero": [n for n, p in parameters.items() if p.dim() > 1 and _is_zero(p, values[n])],
                "wrong": wrong,
            }
        return {
            **{kind: names[:most] for kind, names in found.items()},
            "parameters": len(parameters),
            "nbytes": sum(parameter.nbytes for parameter in parameters.values()),
            "fingerprint": _fingerprint(parameters, values),
            "compared": compared,
            "found": {kind: len(names) for kind, names in found.items()},
            "not_compared": why,
        }

    def _compare(self, version: int) -> tuple[list[str], int, str]:
        """Return tensors that differ from what the trainer sent, how many were compared, and why none was."""
        try:
            with self._receiver.lending(version) as (manifest, plan):
                held = held_tensors(plan)
                specs = [spec for spec in manifest.tensors if spec.name in held]
                found = hex_of(digests([held[spec.name] for spec in specs]))
        except RolloutMQError as reason:
            return [], 0, str(reason)
        return [spec.name for spec, value in zip(specs, found, strict=True) if spec.digest != value], len(specs), ""

    def _parameter(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a parameter, by the engine's name or the trainer's: its first values."""
        name, entries = str(question["name"]), int(question["truncate_size"])
        with side_stream(self._receiver.device):
            held: dict[str, torch.Tensor] = dict(_model().named_parameters())
            if name not in held:
                with contextlib.suppress(RolloutMQError):
                    held |= self._of(int(question["version"]), lambda _, plan: held_tensors(plan))[0]
            if name not in held:
                near = nearest(name, list(held))
                raise InvalidField(
                    "name", name, f"a parameter of the engine, or a tensor that this rank holds whole{near}"
                )
            first = held[name][:entries] if held[name].dim() else held[name]
            if first.numel() > MOST_VALUES:
                most = MOST_VALUES * len(first) // first.numel()
                raise InvalidField("truncate_size", entries, f"at most {most} entries of {list(held[name].shape)}")
            return {
                "shape": list(held[name].shape),
                "dtype": dtype_name(held[name].dtype),
                "values": first.float().tolist(),
            }

    def _mark(self, question: dict[str, Any]) -> dict[str, Any]:
        """Note the weights' digests before they go to sleep, and free what is kept beside them."""
        self._receiver.forget(held=False)
        _asleep.clear()
        _asleep.update(_look(dict(_model().named_parameters()))[0])
        if self._receiver.device.type == "cuda":
            torch.cuda.empty_cache()
        return {"parameters": len(_asleep)}

    def _unchanged(self, question: dict[str, Any]) -> dict[str, Any]:
        now = _look(dict(_model().named_parameters()))[0]
        changed = [name for name, value in now.items() if _asleep.get(name) != value]
        return {"intact": bool(_asleep) and not changed, "changed": len(changed), "parameters": len(now)}

    def _idle(self, question: dict[str, Any]) -> dict[str, Any]:
        """Wait until nothing is under way in the scheduler, not even batches after an abort."""
        scheduler, deadline = current(), time.monotonic() + IDLE_S
        while not scheduler.is_fully_idle():
            if time.monotonic() >= deadline:
                raise EngineError(f"SGLang's scheduler was not idle within {IDLE_S:g} s")
            time.sleep(0.005)
        return {}

    def _synchronize(self, question: dict[str, Any]) -> dict[str, Any]:
        """Wait until the device has done everything that was queued."""
        if self._receiver.device.type == "cuda":
            torch.cuda.synchronize(self._receiver.device)
        return {}

    def _paused(self, question: dict[str, Any]) -> dict[str, Any]:
        return {"paused": bool(getattr(current(), "_engine_paused", False))}

    def _kv_use(self, question: dict[str, Any]) -> dict[str, Any]:
        """Read three counters of the thread that runs the model; they may be a step apart."""
        scheduler = current()
        if hasattr(scheduler.token_to_kv_pool_allocator, "full_available_size"):
            raise EngineError("an engine with caches of several kinds")
        tokens = int(scheduler.max_total_num_tokens)
        free = int(scheduler.token_to_kv_pool_allocator.available_size())
        return {"tokens": tokens, "used": max(0, tokens - free - int(scheduler.tree_cache.evictable_size()))}

    def _generated(self, question: dict[str, Any]) -> dict[str, Any]:
        """Name the requests that run and have a token, as of a step or two ago."""
        batches = (current().running_batch, current().last_batch)
        running = (one for batch in batches if batch for one in batch.reqs if not one.finished())
        return {"requests": list({one.rid for one in running if one.output_ids})}

    # --- saving ----------------------------------------------------------------------------------------------------

    def _export(self, question: dict[str, Any]) -> dict[str, Any]:
        """Save the served version under the trainer's names, as a version of a SnapshotStore.

        joined: folder with the pieces of all ranks, of an engine that has more than one.
        """
        version, began, joined = int(question["version"]), time.monotonic(), question.get("joined")

        def packed(specs: Sequence[TensorSpec], plan: CopyPlan | None) -> Snapshot:
            tensors = sharded.joined(specs, Path(joined)) if joined else held_tensors(plan)
            return PackedWeights(version, tensors, keep="host").snapshot()

        snapshot, expected = self._of(version, packed)
        for spec in snapshot.manifest.tensors:
            if expected.get(spec.name, spec.digest) != spec.digest:
                raise DigestMismatch(f"tensor {spec.name}: the engine holds something else than was sent")
        store = SnapshotStore(
            question["path"], keep=KEEP_ALL, base=self._base, file_bytes=question.get("max_size") or FILE_BYTES
        )
        return {
            "path": str(store.save(snapshot)),
            "tensors": len(snapshot.manifest.tensors),
            "nbytes": snapshot.manifest.nbytes,
            "digest": snapshot.manifest.fingerprint,
            "of_the_trainer": bool(expected),
            "seconds": time.monotonic() - began,
        }

    def _pieces(self, question: dict[str, Any]) -> dict[str, Any]:
        """Write this rank's pieces of the served version's tensors, for `_export`."""
        folder = Path(question["joined"])

        def written(_: Sequence[TensorSpec], plan: CopyPlan | None) -> list[str]:
            with disk_errors("writing", folder):
                folder.mkdir(parents=True, exist_ok=True)
                return sharded.write(sharded.pieces(plan), folder, self._receiver.rank)

        return {"files": self._of(int(question["version"]), written)[0]}

    def _of(self, version: int, use: Callable[[Sequence[TensorSpec], CopyPlan | None], T]) -> tuple[T, dict[str, str]]:
        """Call `use` with a layout and how it was loaded; return also the trainer's digests, if the layout is its."""
        with side_stream(self._receiver.device):
            try:
                with self._receiver.lending(version) as (manifest, plan):
                    return use(manifest.tensors, plan), {spec.name: spec.digest for spec in manifest.tensors}
            except WeightSyncError:
                # It was not received, so it is the model as it was loaded, under its checkpoint's names.
                specs = self._own()
                return use(specs, CopyPlan.trace(_model(), specs)), {}

    @property
    def _base(self) -> str | None:
        return self._model_dir if Path(self._model_dir).is_dir() else None

    def _own(self) -> list[TensorSpec]:
        shapes = checkpoint_shapes(self._model_dir)
        if not shapes:
            raise EngineError(f"{self._model_dir!r} has no safetensors files on this host, so no names to export under")
        dtype = next(_model().parameters()).dtype
        return [
            TensorSpec(
                name=name,
                dtype=dtype_name(dtype),
                shape=shape,
                bucket=0,
                offset=0,
                nbytes=dtype.itemsize * torch.Size(shape).numel(),
                digest="0" * 16,
            )
            for name, shape in shapes.items()
        ]

    def _buffers(self, question: dict[str, Any]) -> dict[str, Any]:
        """Name buffers that a checkpoint has, and that are floats."""
        model = _model()
        stored, own = model.state_dict(keep_vars=True), dict(model.named_parameters(remove_duplicate=False))
        return {"names": [name for name, one in stored.items() if name not in own and one.is_floating_point()]}

    def _save_sharded(self, question: dict[str, Any]) -> dict[str, Any]:
        return sharded.save(
            _model(),
            Path(question["path"]),
            self._receiver.rank,
            int(question["version"]),
            base=self._base,
            pattern=question.get("pattern") or sharded.PATTERN,
            max_size=question.get("max_size") or FILE_BYTES,
        )

    def _check_sharded(self, question: dict[str, Any]) -> dict[str, Any]:
        with contextlib.closing(sharded.Shards(_model(), Path(question["path"]), self._receiver.rank)) as shards:
            return {"tensors": shards.check()}

    def _load_sharded(self, question: dict[str, Any]) -> dict[str, Any]:
        """Load a sharded state. It writes to the model, so no request may run."""
        self._receiver.forget(held=True)
        with contextlib.closing(sharded.Shards(_model(), Path(question["path"]), self._receiver.rank)) as shards:
            tensors = shards.load()
        if self._receiver.device.type == "cuda":
            torch.cuda.synchronize(self._receiver.device)
        return {"tensors": tensors}

    def _on_device(self) -> Any:
        device = self._receiver.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _model() -> Any:
    model = current().tp_worker.model_runner.model
    if not hasattr(model, "named_parameters"):
        raise InvalidField("model", type(model).__name__, "a torch module")
    return model


def _look(parameters: Mapping[str, torch.Tensor]) -> tuple[dict[str, str], dict[str, int]]:
    """Return digests, and numbers of NaN and infinite elements, both by name."""
    tensors = [parameter.detach().contiguous() for parameter in parameters.values()]
    values, bad = look(tensors)
    return dict(zip(parameters, hex_of(values), strict=True)), dict(zip(parameters, bad.tolist(), strict=True))


def _chosen(parameters: dict[str, torch.Tensor], only: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the parameters of these names, without names all of them. Raises InvalidField for an unknown one."""
    for name in only:
        if name not in parameters:
            raise InvalidField("only", name, f"a parameter of the engine{nearest(name, list(parameters))}")
    return {name: parameters[name] for name in only} if only else parameters


def _is_zero(parameter: torch.Tensor, value: str) -> bool:
    """Whether every bit is zero. Then the digest is that of the length alone."""
    return parameter.numel() > 0 and value == f"{length_term(parameter.nbytes) & ((1 << 64) - 1):016x}"


def _fingerprint(parameters: Mapping[str, torch.Tensor], values: Mapping[str, str]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(parameters):
        told = (name, str(parameters[name].dtype), tuple(parameters[name].shape), values[name])
        found.update(f"{told}\n".encode())
    return found.hexdigest()
