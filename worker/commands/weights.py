"""Commands about the weights: set their version, audit every bit of them, save them, load them."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError, InvalidField, RequestRefused
from ...messages.model import AuditParams, LoadParams, ParameterParams, SaveParams, SetVersionParams
from ...messages.remote import destination
from ..weights import folder_order
from .files import upload
from .parts import WorkerParts

log = logging.getLogger(__name__)
SERVES_S, LOOK_S = 10.0, 0.02
"""Whoever has weights loaded is told, within so many seconds, whether the worker serves them."""


async def set_version(on: WorkerParts, params: SetVersionParams, deadline: float) -> Mapping[str, Any]:
    async with _whole(on, "set_version", deadline) as before:
        if params.version != before:
            if before < (newest := await on.ledger.committed()):
                raise RequestRefused(f"set_version: this worker has {before}, and is yet to get the pool's {newest}")
            await _reserve(on, "set_version", params.version, f"version {before}")
            on.state.renamed(params.version)
            log.info("what was version %s is called %s from now on, by command", before, params.version)
        return {"version": params.version, "before": before}


async def audit(on: WorkerParts, params: AuditParams, deadline: float) -> Mapping[str, Any]:
    async with _whole(on, "audit", deadline) as version:
        found = await on.engine.operate("audit", {"version": version, **params.model_dump()})
    info = on.engine.info
    return {
        **found,
        "clean": not any(found["found"].values()),
        "version": version,
        "kind": f"{info.model} {info.dtype} tp{info.tp_size} {info.name}-{info.version}",
    }


async def parameter(on: WorkerParts, params: ParameterParams, deadline: float) -> Mapping[str, Any]:
    async with _whole(on, "parameter", deadline) as version:
        return {**await on.engine.operate("parameter", {"version": version, **params.model_dump()}), "version": version}


async def save(on: WorkerParts, params: SaveParams, deadline: float) -> Mapping[str, Any]:
    if params.upload:
        await asyncio.to_thread(destination, params.upload)  # before anything is written
    async with _whole(on, "save", deadline) as version:
        how = {"path": params.path, "version": version, "max_size": params.max_size}
        if params.format == "sharded":
            how |= {"path": str(Path(params.path) / f"sharded-v{version:012d}"), "pattern": params.pattern}
        saved = await on.engine.operate("export" if params.format == "safetensors" else "save_sharded", how)
    result = {**saved, "format": params.format, "version": version}
    if params.upload:
        result |= await asyncio.to_thread(upload, Path(str(saved["path"])), params.upload)
        if params.discard:
            await asyncio.to_thread(shutil.rmtree, saved["path"])
    return result


async def load(on: WorkerParts, params: LoadParams, deadline: float) -> Mapping[str, Any]:
    from ...sync.disk.checkpoint import checkpoint_format  # noqa: PLC0415 – torch

    found = await asyncio.to_thread(checkpoint_format, params.path)
    if found == "snapshots":
        raise InvalidField("path", params.path, "one of the versions in it, v000000000012 or the like")
    if params.format not in ("auto", found):
        raise InvalidField("format", params.format, f"{found!r} or 'auto': that is what is in {params.path}")
    _untouched(on, "load")
    await _reserve(on, "load", params.version, f"{found} {params.path}")
    if found == "sharded":
        result = await _load_sharded(on, params, deadline)
    else:
        result = await _load_named(on, params, deadline)
    log.info("version %s was loaded from %s, by command", params.version, params.path)
    on.state.doubted()  # it serves when it has compared the version with the pool's
    for _ in range(round(SERVES_S / LOOK_S)):
        if on.state.in_service:
            break
        await asyncio.sleep(LOOK_S)
    return {**result, "format": found, "version": params.version, "state": on.state_name()}


async def _load_named(on: WorkerParts, params: LoadParams, deadline: float) -> dict[str, Any]:
    nbytes = await asyncio.to_thread(_size, Path(params.path))
    report = await on.follower.load(folder_order(params.path, params.version, nbytes))
    if not report.ok:
        raise EngineError(f"load: {report.phase}: {report.error}")
    return {"tensors": report.tensors, "nbytes": report.nbytes, "verified": report.readback}


async def _load_sharded(on: WorkerParts, params: LoadParams, deadline: float) -> dict[str, Any]:
    async with _whole(on, "load", deadline) as before:
        _untouched(on, "load")
        if before >= params.version:  # while the turn was waited for
            raise EngineError(f"load: version {before} came first")
        async with on.generation.in_flight.quiet():
            checked = await on.engine.operate("check_sharded", {"path": params.path})
            try:
                await on.engine.operate("load_sharded", {"path": params.path})
            except BaseException:
                on.state.broken()  # half of it may be there
                raise
            on.state.has(params.version)
    return {"tensors": checked["tensors"], "verified": True}


async def _reserve(on: WorkerParts, what: str, version: int, of: str) -> None:
    """Take a version number that nobody has used: cached prefixes and samples are tagged with it."""
    here = on.generation.version
    taken = here if version <= here else await on.ledger.reserve(version, of)
    if taken:
        raise InvalidField(f"{what}: version", version, f"above {max(taken, here)}: that number is taken")


def _untouched(on: WorkerParts, what: str) -> None:
    if not (gate := on.state.weights).is_open:
        raise RequestRefused(f"{what}: the engine is {', '.join(gate.reasons)}")


@asynccontextmanager
async def _whole(on: WorkerParts, what: str, deadline: float) -> AsyncIterator[int]:
    """Give the engine's version, and keep it from changing inside the block."""
    state = on.state
    async with state.turn.take(what, deadline):
        if "asleep" in state.weights.reasons:
            raise RequestRefused(f"{what}: the engine's weights are asleep")
        if state.quarantined:
            raise RequestRefused(f"{what}: the engine's weights are no version: it waits for one")
        yield state.version


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
