"""Memory, caches, checkpoints, profiles and facts: what the pool's workers are told and asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from ...messages.errors import FeatureUnavailable, InvalidField, RolloutMQError
from ...messages.model import MEMORY_TAGS
from .commands import COMMAND_S, NOBODY, Commands

SAVE_S = 3600.0
SAVE_FOLDER = PurePosixPath("/var/tmp")
"""Where a worker writes what it copies away, on its host."""
FIELDS = ("worker_id", "host", "state", "version", "model", "engine", "device", "tp_size", "max_running", "running")


class ControlMethods(Commands):
    """See SkyRLEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asleep: set[str] = set()
        self._halted = ""
        """How `pause_workers` has halted the workers; "" if it has not."""

    async def end_sync(self) -> str | None:
        """See WeightMethods."""
        raise NotImplementedError

    # --- halting ---------------------------------------------------------------------------------------------------

    async def pause_workers(self, mode: str) -> None:
        """Halt all workers with what they run; mode "in_place" or "retract"."""
        await self.ask("pause", {"mode": mode})
        self._halted = mode

    async def resume_workers(self) -> None:
        """Let them go on, if this engine has halted them."""
        if self._halted:
            await self.ask("resume")
            self._halted = ""

    async def stop_calls(self) -> None:
        """End what generates with what it has; engines that are frozen go on for that moment."""
        calls, client = await self.open_calls(), await self.client()
        frozen = self._halted == "in_place"
        if frozen:
            await self.resume_workers()
        try:
            await calls.stop_all(client)
        finally:
            if frozen:
                await self.pause_workers("in_place")

    # --- memory ----------------------------------------------------------------------------------------------------

    async def sleep(
        self,
        *args: Any,
        tags: Sequence[str] | None = None,
        level: int = 1,
        timeout_s: float = COMMAND_S,
        **kwargs: Any,
    ) -> None:
        """Workers give up memory of their GPUs. What runs is continued after `wake_up`.

        tags: "weights", "kv_cache", "cuda_graph", or none for all. level: vLLM's; 1 and 2 are alike here. Raises
        InvalidField, FeatureUnavailable for workers that cannot (a CPU, or an engine without its memory saver).
        """
        wanted = _tags(args, tags, kwargs)
        if level not in (1, 2):
            raise InvalidField("level", level, "1 or 2")
        await self.ask("sleep", {"tags": wanted} if wanted else {}, timeout_s=timeout_s)
        self._asleep |= set(wanted or MEMORY_TAGS)

    async def wake_up(
        self, *args: Any, tags: Sequence[str] | None = None, timeout_s: float = COMMAND_S, **kwargs: Any
    ) -> None:
        """Workers take memory again; tags as for `sleep`. Weights that came meanwhile are published: behind waking the
        weights' memory, if that is to be woken, and before the KV cache's."""
        wanted = _tags(args, tags, kwargs)
        first = [tag for tag in wanted or MEMORY_TAGS if tag == "weights" and tag in self._asleep]
        if first:
            await self._wake(first, timeout_s)
        await self.end_sync()
        if not first:
            await self._wake(wanted, timeout_s)
        elif rest := [tag for tag in wanted or MEMORY_TAGS if tag != "weights" and tag in self._asleep]:
            await self._wake(rest, timeout_s)

    async def _wake(self, tags: Sequence[str], timeout_s: float) -> None:
        await self.ask("wake", {"tags": list(tags)} if tags else {}, timeout_s=timeout_s)
        self._asleep -= set(tags or MEMORY_TAGS)

    async def sleep_weights_only(self, **kwargs: Any) -> None:
        """`sleep` of the weights."""
        await self.sleep(tags=["weights"], **kwargs)

    async def wake_up_weights_only(self, **kwargs: Any) -> None:
        """`wake_up` of the weights."""
        await self.wake_up(tags=["weights"], **kwargs)

    async def sleep_all(self, **kwargs: Any) -> None:
        """`sleep` of everything."""
        await self.sleep(**kwargs)

    async def wake_up_all(self, **kwargs: Any) -> None:
        """`wake_up` of everything."""
        await self.wake_up(**kwargs)

    # --- caches ----------------------------------------------------------------------------------------------------

    async def reset_prefix_cache(self) -> None:
        """Publishes weights that came, and drops all cached prefixes. Those of other versions are never used anyway."""
        await self.end_sync()
        await self.flush_caches()

    async def flush_caches(self) -> None:
        """Drop all cached prefixes, but for those of workers that are asleep and have none."""
        if not self._asleep:
            await self.ask("flush_cache")

    async def clear_hicache_storage(self) -> bool:
        """Clear the storage behind the hierarchical caches; True. Raises FeatureUnavailable where there is none."""
        return bool(await self.ask("clear_storage"))

    # --- disk ------------------------------------------------------------------------------------------------------

    async def save_sharded_model(self, save_path: str, pattern: str | None = None, max_size: int | None = None) -> bool:
        """One worker writes what it serves into a folder of its host, in SGLang's sharded format; True.

        Raises InvalidField for pattern and max_size, which it does not take, and as the command "save" does.
        """
        for name, value in (("pattern", pattern), ("max_size", max_size)):
            if value is not None:
                raise InvalidField(name, value, "None: files are named and cut as SGLang does by default")
        await self.ask_one("save", {"path": save_path, "format": "sharded"}, timeout_s=SAVE_S)
        return True

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """One worker writes what it serves, as safetensors, and copies it to a URL by fsspec; True.

        remote_path: a URL, or what comes behind `storage_type`://. The files stay in SAVE_FOLDER.
        """
        behind = remote_path if storage_type == "file" else remote_path.lstrip("/")
        url = remote_path if "://" in remote_path else f"{storage_type}://{behind}"
        if not url.startswith(f"{storage_type}://"):
            raise InvalidField("storage_type", storage_type, f"{url.partition('://')[0]!r}, as the URL has it")
        folder = SAVE_FOLDER / f"rolloutmq-save-{secrets.token_hex(8)}"
        await self.ask_one("save", {"path": str(folder), "upload": url}, timeout_s=SAVE_S)
        return True

    # --- profiles --------------------------------------------------------------------------------------------------

    async def start_profile(self) -> bool:
        """Every worker begins to record; True. Raises what a worker raises that records already."""
        return bool(await self.ask("start_profile")) or _nobody("start_profile")

    async def stop_profile(self) -> dict[str, Any] | None:
        """Worker -> where its traces are; None from a pool without workers."""
        return await self.ask("stop_profile") or None

    # --- facts -----------------------------------------------------------------------------------------------------

    async def get_server_info(self) -> dict[str, Any]:
        """The pool: its name, the workers as of their last heartbeat, how much is queued, and the newest version."""
        client = await self.client()
        workers, load = await asyncio.gather(self.workers(), client.load())
        return {
            "pool": self.pool,
            "workers": [
                {name: getattr(one, name) for name in FIELDS} | {"features": list(one.features)} for one in workers
            ],
            "weight_version": str(max((worker.version for worker in workers), default=0)),
            "load": {name: getattr(load, name) for name in load.__slots__}
            if hasattr(load, "__slots__")
            else vars(load),
        }

    async def get_memory_pool_size(self) -> dict[str, int]:
        """{"total_tokens", "available_tokens", "used_tokens"} of the workers' KV caches together.

        Raises FeatureUnavailable if a worker does not tell.
        """
        answers = await self.ask("version")
        if not answers:
            _nobody("get_memory_pool_size")
        totals = {"total_tokens": 0, "available_tokens": 0, "used_tokens": 0}
        for worker, answer in answers.items():
            pool = answer.get("kv_tokens")
            if not isinstance(pool, dict) or not totals.keys() <= pool.keys():
                raise FeatureUnavailable("get_memory_pool_size", None, f"nothing: worker {worker} does not tell it")
            for name in totals:
                totals[name] += int(pool[name])
        return totals

    async def validate_weights(
        self, weight_names: Iterable[str] | None = None, check_nan: bool = True, check_inf: bool = True
    ) -> dict[str, Any]:
        """Every worker looks through all of its engine's parameters: {"valid", "version", "nonfinite", "zero", "wrong",
        "workers": worker -> its whole finding}.

        nonfinite: parameters with NaN or Inf; zero: matrices of zeros; both in the engine's names, which may have fused
        several of the trainer's. wrong: tensors that are not bit for bit what was published, in the trainer's names.
        weight_names: these, and all others: there is no look at some. NaN and Inf are looked for at once: with both
        switches off they do not count.
        """
        if check_nan != check_inf:
            raise InvalidField("check_inf", check_inf, f"{check_nan}, as check_nan: both are looked for at once")
        if isinstance(weight_names, str):
            raise InvalidField("weight_names", weight_names, "names, or None")
        answers = await self.ask("audit", {"names": 10_000})
        if not answers:
            _nobody("validate_weights")
        kinds = ("nonfinite", "zero", "wrong")
        found = {kind: sorted({name for one in answers.values() for name in one.get(kind, ())}) for kind in kinds}
        bad = found["wrong"] + found["zero"] + (found["nonfinite"] if check_nan else [])
        versions = {int(one["version"]) for one in answers.values()}
        return {"valid": not bad, "version": str(max(versions)), **found, "workers": answers}

    async def check_weight_sync_integrity(self, expected_version: str | int | None = None) -> dict[str, Any]:
        """Whether all workers serve one version with the same bits: {"consistent", "expected_version", "versions":
        worker -> version, "fingerprints": worker -> of its parameters, "wrong": worker -> tensors that differ}.

        expected_version: by default the newest one that was published. Fingerprints are compared between workers of one
        kind (model, dtype, tensor parallelism and engine).
        """
        expected = str(expected_version) if expected_version is not None else await self.get_weight_version()
        answers = await self.ask("audit")
        if not answers:
            _nobody("check_weight_sync_integrity")
        versions = {worker: str(one["version"]) for worker, one in answers.items()}
        prints = {worker: str(one.get("fingerprint", "")) for worker, one in answers.items()}
        kinds: dict[str, set[str]] = {}
        for worker, one in answers.items():
            kinds.setdefault(str(one.get("kind", "")), set()).add(prints[worker])
        wrong = {worker: list(one.get("wrong", ())) for worker, one in answers.items() if one.get("wrong")}
        consistent = set(versions.values()) == {expected} and not wrong and all(len(one) == 1 for one in kinds.values())
        return {
            "consistent": consistent,
            "expected_version": expected,
            "versions": versions,
            "fingerprints": prints,
            "wrong": wrong,
        }

    async def get_weight_version(self) -> str | None:
        """See WeightMethods."""
        raise NotImplementedError

    async def get_weights_by_name(self, name: str) -> Any:
        """Raises FeatureUnavailable: weights do not come back from workers; `validate_weights` compares them there."""
        raise FeatureUnavailable("get_weights_by_name", name, "validate_weights, which compares them where they are")

    # --- parallelism -----------------------------------------------------------------------------------------------

    def tp_size(self) -> int:
        """Tensor-parallel size of a worker's engine."""
        return self._size("tp_size")

    def pp_size(self) -> int:
        """Pipeline-parallel size of a worker's engine."""
        return self._size("pp_size")

    def dp_size(self) -> int:
        """Data-parallel size of a worker's engine; how many workers there are says `get_server_info`."""
        return self._size("dp_size")

    def ep_size(self) -> int:
        """Expert-parallel size of a worker's engine."""
        return self._size("ep_size")

    def _size(self, name: str) -> int:
        """What the workers say. Raises RolloutMQError if there is none, or if they differ."""
        sizes = {int(getattr(worker, name, 1)) for worker in self.workers_now()}
        if len(sizes) != 1:
            raise RolloutMQError(f"{name}: " + (f"workers differ: {sorted(sizes)}" if sizes else NOBODY))
        return sizes.pop()


def _tags(args: Sequence[Any], tags: Any, kwargs: dict[str, Any]) -> list[str]:
    if kwargs:
        name = min(kwargs)
        raise InvalidField(name, kwargs[name], "tags, level and timeout_s are the only arguments")
    given = tags if tags is not None else args[0] if args else None
    found = [given] if isinstance(given, str) else list(given or ())
    for tag in found:
        if tag not in MEMORY_TAGS:
            raise InvalidField("tags", tag, f"some of {', '.join(MEMORY_TAGS)}, or none for all")
    return found


def _nobody(what: str) -> bool:
    raise RolloutMQError(f"{what}: {NOBODY}")
