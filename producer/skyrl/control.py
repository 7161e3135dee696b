"""The engine's commands and questions to the workers: halts, memory, caches, saving, audits and facts."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from ...messages import errors
from ...messages.errors import (
    EngineError,
    FeatureUnavailable,
    InvalidField,
    RequestRefused,
    RolloutMQError,
    WaitTimeout,
)
from ...messages.model import MEMORY_TAGS
from ..control import NO_ANSWER, Answer, Answers, PoolAudit
from .calls import Calls
from .core import NOBODY, EngineCore, positive_seconds


class MemoryTag(StrEnum):
    """What `sleep` and `wake_up` release and take back. Their text does as well."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


COMMAND_S = 120.0
SAVE_S = 3600.0
SAVE_FOLDER = PurePosixPath("/var/tmp")
"""The folder on a worker's host for files that the worker uploads."""
FIELDS = ("worker_id", "host", "state", "version", "model", "engine", "device", "tp_size", "max_running", "running")
_CANNOT = frozenset({"RequestRefused", "UnknownAction"})


class WorkerControl:
    """Commands to the pool's workers. SkyRLEngine documents the methods without a docstring.

    halted: the mode in which `halt` halted the workers, "" while they run. asleep: the memory tags that are asleep.
    """

    def __init__(self, core: EngineCore, calls: Calls) -> None:
        self._core, self._calls = core, calls
        self.halted = ""
        self.asleep: set[str] = set()

    # --- commands --------------------------------------------------------------------------------------------------

    async def ask(
        self, action: str, params: dict[str, Any] | None = None, *, worker_id: str = "", timeout_s: float = COMMAND_S
    ) -> dict[str, dict[str, Any]]:
        """Each worker's answer, {} in a pool without workers. Workers that left meanwhile are not in it.

        Raises a worker's error under its name, with the worker's id in the text. Raises FeatureUnavailable for a
        command that a worker cannot do, and WaitTimeout if a living worker did not answer.
        """
        client = await self._core.client()
        return await self._done(await client.control.send(action, params, worker_id=worker_id, timeout=timeout_s))

    async def _done(self, answers: Answers) -> dict[str, dict[str, Any]]:
        """The results of the workers that executed the command. Raises as `ask` does."""
        silent = [one for one in answers.failed if one.kind == NO_ANSWER]
        alive = {worker.worker_id for worker in await self._core.workers()} if silent else set()
        for one in answers.failed:
            if one not in silent or one.worker_id in alive:
                raise _error(answers.action, one)
        return {worker: dict(result) for worker, result in answers.results.items()}

    async def _audit(self, method: str, names: int) -> tuple[PoolAudit, dict[str, dict[str, Any]]]:
        """An audit for a method of SkyRL's, and each worker's finding. names: most names of tensors in a finding."""
        client = await self._core.client()
        audit = await client.control.audit(names=names, timeout=COMMAND_S)
        return audit, _some(method, await self._done(audit.answers))

    async def _ask_one(self, action: str, params: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of the least busy serving worker. Raises RolloutMQError if there is none; otherwise as `ask`."""
        workers = await self._core.workers()
        serving = [worker for worker in workers if worker.state == "serving"] or workers
        if not serving:
            raise RolloutMQError(f"{action}: {NOBODY}")
        chosen = min(serving, key=lambda worker: (worker.running, worker.worker_id)).worker_id
        answers = await self.ask(action, params, worker_id=chosen, timeout_s=timeout_s)
        if chosen not in answers:
            raise EngineError(f"{action}: worker {chosen} has left")
        return answers[chosen]

    # --- halting ---------------------------------------------------------------------------------------------------

    async def halt(self, mode: str) -> None:
        """Halt all workers and the samples that they run. mode: "in_place" or "retract"."""
        await self.ask("pause", {"mode": mode})
        self.halted = mode

    async def resume(self) -> None:
        """Let the workers go on, if this engine halted them."""
        if self.halted:
            await self.ask("resume")
            self.halted = ""

    def check_takes_weights(self, what: str) -> None:
        """Raises RequestRefused if this engine has halted all workers in place."""
        if self.halted == "in_place":
            raise RequestRefused(f"{what}: workers that are halted in place take no weights: continue_generation first")

    @contextlib.asynccontextmanager
    async def thawed(self) -> AsyncIterator[None]:
        """Engines that are halted in place go on in this block. A halted one ends no request and takes no weights."""
        frozen = self.halted == "in_place"
        if frozen:
            await self.resume()
        try:
            yield
        finally:
            if frozen:
                await self.halt("in_place")

    async def end_calls(self) -> None:
        """End this engine's calls with the tokens they have."""
        await self._core.client()
        async with self.thawed():
            await self._calls.stop_all()

    # --- memory and caches -----------------------------------------------------------------------------------------

    async def sleep(
        self, tags: Sequence[str], level: int, timeout_s: float, *, abort_first: bool, drain_timeout: float | None
    ) -> None:
        """Workers release the memory of these tags. () means all."""
        if level not in (1, 2):
            raise InvalidField("level", level, "1 or 2")
        positive_seconds("timeout", timeout_s)
        if positive_seconds("drain_timeout", drain_timeout) is not None or abort_first:
            await (self.end_calls() if abort_first else self._core.client())
            await self._calls.idle(timeout_s if drain_timeout is None else drain_timeout)
        await self.ask("sleep", {"tags": list(tags)} if tags else {}, timeout_s=timeout_s)
        self.asleep |= set(tags or MEMORY_TAGS)

    async def wake(self, tags: Sequence[str], timeout_s: float, end_sync: Callable[[], Awaitable[Any]]) -> None:
        """Workers take memory back. end_sync: awaited when the weights' memory is back, before the KV cache's."""
        asleep = [tag for tag in tags or MEMORY_TAGS if tag in self.asleep]
        weights_first = "weights" in asleep
        if weights_first:
            await self._wake(["weights"], timeout_s)
        await end_sync()
        if not weights_first:
            await self._wake(tags, timeout_s)
        elif rest := [tag for tag in asleep if tag != "weights"]:
            await self._wake(rest, timeout_s)

    async def _wake(self, tags: Sequence[str], timeout_s: float) -> None:
        await self.ask("wake", {"tags": list(tags)} if tags else {}, timeout_s=timeout_s)
        self.asleep -= set(tags or MEMORY_TAGS)

    async def reset_caches(self, running_too: bool) -> None:
        """Drop all cached prefixes. running_too: also the KV cache of what runs; workers compute it again."""
        if not running_too or self.halted == "retract":
            await self.flush_caches()
            return
        async with self.thawed():
            await self.halt("retract")
            try:
                await self.flush_caches()
            finally:
                await self.resume()

    async def flush_caches(self) -> None:
        """Drop all cached prefixes. Sleeping workers have none and are not asked."""
        if not self.asleep:
            await self.ask("flush_cache")

    async def clear_storage(self) -> bool:
        return bool(await self.ask("clear_storage"))

    # --- saving and profiling --------------------------------------------------------------------------------------

    async def save_sharded(self, path: str, pattern: str | None, max_size: int | None) -> bool:
        for name, value in (("pattern", pattern), ("max_size", max_size)):
            if value is not None:
                raise InvalidField(name, value, "None: files are named and cut as SGLang does by default")
        await self._ask_one("save", {"path": path, "format": "sharded"}, SAVE_S)
        return True

    async def save_remote(self, remote_path: str, storage_type: str) -> bool:
        behind = remote_path if storage_type == "file" else remote_path.lstrip("/")
        url = remote_path if "://" in remote_path else f"{storage_type}://{behind}"
        if not url.startswith(f"{storage_type}://"):
            raise InvalidField("storage_type", storage_type, f"{url.partition('://')[0]!r}, as the URL has it")
        folder = SAVE_FOLDER / f"rolloutmq-save-{secrets.token_hex(8)}"
        await self._ask_one("save", {"path": str(folder), "upload": url}, SAVE_S)
        return True

    async def start_profile(self) -> bool:
        return bool(_some("start_profile", await self.ask("start_profile")))

    # --- facts -----------------------------------------------------------------------------------------------------

    async def server_info(self) -> dict[str, Any]:
        client = await self._core.client()
        workers, load = await asyncio.gather(self._core.workers(), client.load())
        return {
            "pool": self._core.pool,
            "workers": [
                {name: getattr(one, name) for name in FIELDS} | {"features": list(one.features)} for one in workers
            ],
            "weight_version": self._core.versions.text(max((worker.version for worker in workers), default=0)),
            "load": dataclasses.asdict(load),
        }

    async def validate(self, weight_names: Iterable[str] | None, check_nan: bool, check_inf: bool) -> dict[str, Any]:
        if check_nan != check_inf:
            raise InvalidField("check_inf", check_inf, f"{check_nan}, as check_nan: both are looked for at once")
        if isinstance(weight_names, str):
            raise InvalidField("weight_names", weight_names, "names, or None")
        audit, answers = await self._audit("validate_weights", 10_000)
        kinds = ("nonfinite", "zero", "wrong")
        found = {kind: sorted({name for one in answers.values() for name in one.get(kind, ())}) for kind in kinds}
        bad = found["wrong"] + found["zero"] + (found["nonfinite"] if check_nan else [])
        version = self._core.versions.text(max(audit.versions.values()))
        return {"valid": not bad, "version": version, **found, "workers": answers}

    async def compare(self, expected_version: str | int | None) -> dict[str, Any]:
        names = self._core.versions
        expected = names.text(names.number("expected_version", expected_version)[0])
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

    async def world_size(self) -> tuple[int, int]:
        """The GPUs (or CPU ranks) of all workers' engines, and of one. Raises RolloutMQError as `size` does."""
        workers = await self._core.workers()
        each = [worker.tp_size for worker in workers]
        if len(set(each)) != 1:
            raise RolloutMQError("get_world_size: " + (f"workers differ: {sorted(set(each))}" if each else NOBODY))
        return sum(each), each[0]

    def size(self, name: str) -> int:
        """The parallel size of all workers. Raises RolloutMQError if there is no worker, or if they differ."""
        sizes = {int(getattr(worker, name, 1)) for worker in self._core.workers_now()}
        if len(sizes) != 1:
            raise RolloutMQError(f"{name}: " + (f"workers differ: {sorted(sizes)}" if sizes else NOBODY))
        return sizes.pop()


def memory_tags(args: Sequence[Any], tags: Any, kwargs: dict[str, Any]) -> list[str]:
    """The memory tags in the arguments of `sleep` or `wake_up`, in any of SkyRL's forms. Raises InvalidField."""
    if kwargs:
        name = min(kwargs)
        raise InvalidField(name, kwargs[name], "one of tags, level, timeout, abort_first, drain_timeout")
    given = tags if tags is not None else args[0] if args else None
    found = [str(tag) for tag in ([given] if isinstance(given, str) else given or ())]
    for tag in found:
        if tag not in MEMORY_TAGS:
            raise InvalidField("tags", tag, f"some of {', '.join(MEMORY_TAGS)}, or none for all")
    return found


def _some(method: str, answers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The answers. Raises RolloutMQError if there are none."""
    if not answers:
        raise RolloutMQError(f"{method}: {NOBODY}")
    return answers


def _error(action: str, answer: Answer) -> RolloutMQError:
    text = f"worker {answer.worker_id}: {answer.error}"
    if answer.kind in _CANNOT:
        return FeatureUnavailable(action, None, text)
    if answer.kind == NO_ANSWER:
        return WaitTimeout(f"{action}: {text}")
    if answer.kind == "InvalidField":
        return InvalidField(action, None, text)
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, RolloutMQError) and "__init__" not in vars(kind):
        return kind(text)
    return EngineError(f"{action}: {text}")
