"""The methods of SkyRLEngine that only ask workers: checks of their weights, saving, profiles, facts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, TypeVar

from ...messages.errors import EngineError, FeatureUnavailable, InvalidField, RolloutMQError
from ..control import PoolAudit
from .control import COMMAND_S, WorkerControl
from .core import NOBODY, EngineCore
from .weights import WeightSync

Value = TypeVar("Value", int, str)
EMBED = "task:embed"
SAVE_S = 3600.0
SAVE_FOLDER = PurePosixPath("/var/tmp")
"""The folder on a worker's host for files that the worker uploads."""


class Extras:
    """Base of SkyRLEngine, which has the parts that these methods call."""

    _core: EngineCore
    _control: WorkerControl
    _weights: WeightSync

    async def validate_weights(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Every worker checks all parameters of its engine, or those of these names: {"valid", "version", "nan", "inf",
        "zero", "wrong", "workers": worker -> its whole finding}.
        nan, inf: parameters with such a value. zero: matrices of zeros. All are in the engine's names. wrong: tensors
        that differ in a bit from the published ones, in the trainer's names; not looked for with `names`, which are the
        engine's. Raises InvalidField for an unknown name, and for no name at all."""
        if names is not None and not names:
            raise InvalidField("names", names, "names of parameters, or None for all")
        audit, answers = await self._audit("validate_weights", 10_000, names or ())
        kinds = ("nan", "inf", "zero", "wrong")
        found = {kind: sorted({name for one in answers.values() for name in one.get(kind, ())}) for kind in kinds}
        version = self._core.versions.text(max(audit.versions.values()))
        return {"valid": not any(found.values()), "version": version, **found, "workers": answers}

    async def check_weight_sync_integrity(self, expected_version: str | int | None = None) -> dict[str, Any]:
        """Whether all workers serve one version with the same bits: {"consistent", "expected_version", "versions":
        worker -> version, "fingerprints": worker -> digest of its parameters, "wrong": worker -> tensors that differ}.
        expected_version: the newest one by default. Fingerprints of workers of different kinds cannot be compared."""
        names = self._core.versions
        wanted = await self._weights.version() if expected_version is None else expected_version
        expected = names.text(names.number("expected_version", wanted)[0])
        audit, answers = await self._audit("check_weight_sync_integrity", 20)
        versions = {worker: names.text(version) for worker, version in audit.versions.items()}
        wrong = {worker: list(one["wrong"]) for worker, one in answers.items() if one.get("wrong")}
        return {
            "consistent": set(versions.values()) == {expected} and not wrong and not audit.apart,
            "expected_version": expected,
            "versions": versions,
            "fingerprints": {worker: str(one["fingerprint"]) for worker, one in answers.items()},
            "wrong": wrong,
        }

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        """The first `truncate_size` entries (rows of a matrix) of a parameter of one worker's engine, as nested lists
        of floats. With tensor parallelism they are of the part of rank 0; `PoolControl.parameter` has the others.
        name: the engine's, or the trainer's where the engine holds the tensor whole. Raises InvalidField for an unknown
        name, and for more than 1,048,576 values."""
        return (await self._ask_one("parameter", {"name": name, "truncate_size": truncate_size}))["values"]

    async def save_sharded_model(self, path: str, pattern: str | None = None, max_size: int | None = None) -> bool:
        """One worker saves its weights into a folder of its host, in SGLang's sharded format. Returns True.
        pattern, max_size: the names of the files, and the most bytes of one; None for SGLang's own."""
        given = {"pattern": pattern, "max_size": max_size}
        params = {"path": path, "format": "sharded"} | {name: one for name, one in given.items() if one is not None}
        await self._ask_one("save", params)
        return True

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """One worker saves its weights as safetensors and copies them to a URL with fsspec. Returns True.
        remote_path: a URL, or its part after `storage_type`://. They go through the worker's /var/tmp, and stay
        there if the copy fails: the error says where."""
        behind = remote_path if storage_type == "file" else remote_path.lstrip("/")
        url = remote_path if "://" in remote_path else f"{storage_type}://{behind}"
        if not url.startswith(f"{storage_type}://"):
            raise InvalidField("storage_type", storage_type, f"{url.partition('://')[0]!r}, as the URL has it")
        folder = SAVE_FOLDER / f"rolloutmq-save-{secrets.token_hex(8)}"
        await self._ask_one("save", {"path": str(folder), "upload": url, "discard": True})
        return True

    async def start_profile(self) -> bool:
        """Every worker starts its profiler. Returns True. Raises a worker's error if its profiler runs already."""
        return bool(_some("start_profile", await self._control.ask("start_profile")))

    async def stop_profile(self) -> dict[str, Any] | None:
        """Worker -> folder of its traces. None for a pool without workers."""
        return await self._control.ask("stop_profile") or None

    def tp_size(self) -> int:
        """Tensor-parallel size of a worker's engine. Raises RolloutMQError if workers differ or there is none."""
        return self._size("tp_size")

    def pp_size(self) -> int:
        """Pipeline-parallel size; see `tp_size`."""
        return self._size("pp_size")

    def dp_size(self) -> int:
        """Data-parallel size of a worker's engine, however many workers there are; see `tp_size`."""
        return self._size("dp_size")

    def ep_size(self) -> int:
        """Expert-parallel size; see `tp_size`."""
        return self._size("ep_size")

    def get_memory_pool_size(self) -> int:
        """How many tokens fit into the KV caches of all workers' engines. Raises RolloutMQError if there is none."""
        sizes = [worker.kv_tokens for worker in self._core.workers_now()]
        return sum(sizes) if sizes else _only("get_memory_pool_size", set())

    def supports_streaming(self) -> bool:
        """True."""
        return True

    def supports_sessions(self) -> bool:
        """True."""
        return True

    def supports_embeddings(self) -> bool:
        """Whether a worker has an embedding model."""
        return any(EMBED in worker.features for worker in self._core.workers_now())

    @property
    def model_name(self) -> str:
        """The model that the pool's workers serve. Raises RolloutMQError if they differ or there is none."""
        return _only("model_name", {worker.model for worker in self._core.workers_now()})

    async def get_world_size(self) -> tuple[int, int]:
        """(ranks of all workers' engines, ranks of one). Raises RolloutMQError if they differ or there is none."""
        workers = await self._core.workers()
        each = _only("get_world_size", {one.tp_size * one.pp_size * one.dp_size for one in workers})
        return each * len(workers), each

    def get_endpoint_url(self) -> str:
        """Raises FeatureUnavailable: this engine is called in its process, and has no HTTP endpoint."""
        raise FeatureUnavailable("get_endpoint_url", None, "chat_completion and completion, which take OpenAI's bodies")

    async def _audit(
        self, method: str, names: int, only: Sequence[str] = ()
    ) -> tuple[PoolAudit, dict[str, dict[str, Any]]]:
        """An audit for a method of SkyRL's, and each worker's finding. names, only: see PoolControl.audit."""
        client = await self._core.client()
        audit = await client.control.audit(names=names, only=only, timeout=COMMAND_S)
        return audit, _some(method, await self._control.done(audit.answers))

    async def _ask_one(self, action: str, params: dict[str, Any]) -> dict[str, Any]:
        """The answer of the least busy serving worker. Raises RolloutMQError if there is none, otherwise as `ask`."""
        workers = await self._core.workers()
        serving = [worker for worker in workers if worker.state == "serving"] or workers
        if not serving:
            raise RolloutMQError(f"{action}: {NOBODY}")
        chosen = min(serving, key=lambda worker: (worker.running, worker.worker_id)).worker_id
        answers = await self._control.ask(action, params, worker_id=chosen, timeout_s=SAVE_S)
        if chosen not in answers:
            raise EngineError(f"{action}: worker {chosen} has left")
        return answers[chosen]

    def _size(self, name: str) -> int:
        return _only(name, {int(getattr(worker, name)) for worker in self._core.workers_now()})


def _only(what: str, values: set[Value]) -> Value:
    """What all workers have. Raises RolloutMQError if there is no worker, or if they differ."""
    if len(values) != 1:
        raise RolloutMQError(f"{what}: " + (f"workers differ: {sorted(map(str, values))}" if values else NOBODY))
    return values.pop()


def _some(method: str, answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answers. Raises RolloutMQError if there are none."""
    if not answers:
        raise RolloutMQError(f"{method}: {NOBODY}")
    return answers
