"""An operator's operations on an SGLang engine: caches, memory, freezing, profiles, saving. One function for each.

Questions to SGLang itself go through its tokenizer manager. Questions about the weights go through the control channel
to the scheduler processes (`inside/operations.py`).
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ...messages.errors import EngineError, InvalidField, RequestRefused
from ..engine import EngineInfo
from .run import SGLangRun
from .wire import sglang_request

IDLE_S = 10.0
FREEZE_S = 10.0
LOOK_S = 0.01
_profiles: WeakKeyDictionary[SGLangRun, str] = WeakKeyDictionary()
"""The folder of the profile that was started last."""


async def operate(run: SGLangRun, info: EngineInfo, operation: str, params: dict[str, Any]) -> dict[str, Any]:
    """See `Engine.operate`."""
    if operation not in OPERATIONS:
        raise RequestRefused(f"{operation}: not known to {info.name} {info.version} on this worker")
    return await OPERATIONS[operation](run, info, params)


# --- caches -----------------------------------------------------------------------------------------------------------


async def _flush_cache(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    answer = await run.manager.flush_cache(timeout_s=IDLE_S)
    if not answer.success:
        raise EngineError(f"SGLang did not flush its cache: {getattr(answer, 'message', '') or 'it is not idle'}")
    return {}


async def _clear_storage(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    if not run.manager.server_args.enable_hierarchical_cache:
        raise RequestRefused(
            "clear_storage: this engine has no hierarchical cache; it is started with the SGLang argument "
            "enable_hierarchical_cache"
        )
    if not (await run.manager.clear_hicache_storage()).success:
        raise EngineError("SGLang did not clear the storage of its hierarchical cache")
    return {}


# --- freezing ---------------------------------------------------------------------------------------------------------


async def _freeze(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    await run.manager.pause_generation(sglang_request("PauseGenerationReqInput", mode="in_place"))
    await _until_paused(run, True)
    return {}


async def _thaw(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    # Emptying the device's cache gives back what an update has freed. Nothing was updated, and a CPU has no such cache.
    await run.manager.continue_generation(sglang_request("ContinueGenerationReqInput", torch_empty_cache=False))
    await _until_paused(run, False)
    return {}


async def _until_paused(run: SGLangRun, wanted: bool) -> None:
    """Ask the scheduler of every rank until it has paused or gone on. SGLang itself does not answer these requests."""
    deadline = time.monotonic() + FREEZE_S
    for rank in range(run.config.tp_size):
        while (await run.channel.operate(rank, "paused"))["paused"] != wanted:
            if time.monotonic() >= deadline:
                raise EngineError(f"SGLang did not {'pause' if wanted else 'go on'} within {FREEZE_S:g} s")
            await asyncio.sleep(LOOK_S)


# --- memory -----------------------------------------------------------------------------------------------------------


def _check_memory(run: SGLangRun, info: EngineInfo) -> None:
    if info.device != "cuda":
        raise RequestRefused(f"sleep: SGLang gives memory back on GPUs only, and this engine runs on {info.device!r}")
    if not run.manager.server_args.enable_memory_saver:
        raise RequestRefused("sleep: this engine was started without SGLangConfig(memory_saver='on')")


async def _sleep(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    _check_memory(run, info)
    if not (tags := list(params["tags"])):  # the question is only whether it could
        return {}
    await _every_rank(run, "idle")  # if one is not idle, an assertion of SGLang's ends the scheduler
    if "weights" in tags:
        await _every_rank(run, "mark")
    await run.manager.release_memory_occupation(sglang_request("ReleaseMemoryOccupationReqInput", tags=tags))
    return {}


async def _wake(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    _check_memory(run, info)
    tags = list(params["tags"])
    await run.manager.resume_memory_occupation(sglang_request("ResumeMemoryOccupationReqInput", tags=tags))
    if "weights" not in tags:
        return {"intact": True}
    return {"intact": all(rank["intact"] for rank in await _every_rank(run, "unchanged"))}


# --- profiles ---------------------------------------------------------------------------------------------------------


async def _start_profile(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    activities = list(params.get("activities") or (("CPU", "GPU") if info.device == "cuda" else ("CPU",)))
    if info.device != "cuda" and (wrong := [each for each in activities if each != "CPU"]):
        raise RequestRefused(f"activities={wrong}: this engine runs on {info.device!r}, where there is only 'CPU'")
    folder = await asyncio.to_thread(_folder, params.get("folder"))
    request = sglang_request("ProfileReq", output_dir=folder, activities=activities, num_steps=params.get("steps"))
    try:
        await run.manager.start_profile(request)
    except RuntimeError as error:
        raise EngineError(f"SGLang did not start its profiler: {error}") from error
    _profiles[run] = folder
    return {"folder": folder, "activities": activities}


async def _stop_profile(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    folder = _profiles.get(run)
    if folder is None:
        raise RequestRefused("stop_profile: no profile was started")
    try:
        await run.manager.stop_profile()
    except RuntimeError as error:
        if not await asyncio.to_thread(_files, folder):  # with files it has stopped by itself, after its steps
            raise EngineError(f"SGLang did not stop its profiler: {error}") from error
    del _profiles[run]
    return {"folder": folder, "files": await asyncio.to_thread(_files, folder)}


def _folder(wanted: str | None) -> str:
    folder = wanted or tempfile.mkdtemp(prefix="rolloutmq-profile-")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return folder


def _files(folder: str) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(Path(folder).iterdir()) if file.is_file()}


# --- weights ----------------------------------------------------------------------------------------------------------


async def _every_rank(run: SGLangRun, operation: str, **params: Any) -> list[dict[str, Any]]:
    asked = (run.channel.operate(rank, operation, **params) for rank in range(run.config.tp_size))
    return list(await asyncio.gather(*asked))


async def floating_buffers(run: SGLangRun) -> list[str]:
    """Name the model's persistent buffers of floats: a checkpoint has them, and no version is checked for them."""
    ranks = await _every_rank(run, "buffers")
    return sorted({name for rank in ranks for name in rank["names"]})


async def _audit(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    ranks = await _every_rank(run, "audit", **params)
    merged = dict(ranks[0])
    for rank in ranks[1:]:
        for name in merged["found"]:
            merged[name] = sorted({*merged[name], *rank[name]})[: params["names"]]
        merged["found"] = {name: merged["found"][name] + rank["found"][name] for name in merged["found"]}
        merged["fingerprint"] = f"{merged['fingerprint']},{rank['fingerprint']}"
        merged["nbytes"] += rank["nbytes"]
    return merged


async def _parameter(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    if (rank := params["rank"]) >= run.config.tp_size:
        raise InvalidField("rank", rank, f"0 to {run.config.tp_size - 1}, a rank of this engine")
    found = await run.channel.operate(rank, "parameter", **{name: params[name] for name in params if name != "rank"})
    return {**found, "rank": rank, "ranks": run.config.tp_size}


async def _export(run: SGLangRun, info: EngineInfo, params: dict[str, Any]) -> dict[str, Any]:
    if run.config.tp_size == 1:
        return (await _every_rank(run, "export", **params))[0]
    # No rank holds a tensor whole. Each writes its pieces into a folder, and the first one joins them.
    joined = str(Path(params["path"]) / f".joining-{secrets.token_hex(8)}")
    try:
        await _every_rank(run, "pieces", version=params["version"], joined=joined)
        return await run.channel.operate(0, "export", **params, joined=joined)
    finally:
        await asyncio.to_thread(shutil.rmtree, joined, True)


async def _sharded(run: SGLangRun, operation: str, params: dict[str, Any]) -> dict[str, Any]:
    ranks = await _every_rank(run, operation, **params)
    return {**ranks[0], "tensors": sum(int(rank["tensors"]) for rank in ranks), "ranks": len(ranks)}


Operation = Callable[[SGLangRun, EngineInfo, dict[str, Any]], Awaitable[dict[str, Any]]]


OPERATIONS: Mapping[str, Operation] = {
    "flush_cache": _flush_cache,
    "clear_storage": _clear_storage,
    "freeze": _freeze,
    "thaw": _thaw,
    "sleep": _sleep,
    "wake": _wake,
    "audit": _audit,
    "parameter": _parameter,
    "export": _export,
    "save_sharded": lambda run, _, params: _sharded(run, "save_sharded", params),
    "check_sharded": lambda run, _, params: _sharded(run, "check_sharded", params),
    "load_sharded": lambda run, _, params: _sharded(run, "load_sharded", params),
    "start_profile": _start_profile,
    "stop_profile": _stop_profile,
    "kv_use": lambda run, *_: run.channel.operate(0, "kv_use"),
    "generated": lambda run, *_: run.channel.operate(0, "generated"),
}
