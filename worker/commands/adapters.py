"""Commands about LoRA adapters: list them, load one from a folder, unload one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...messages.errors import InvalidField, RequestRefused
from ...messages.model import LoadAdapterParams, NoParams, UnloadAdapterParams
from ..engine import FEATURE, NOT_ENABLED
from .parts import WorkerParts


async def adapters(on: WorkerParts, params: NoParams, deadline: float) -> Mapping[str, Any]:
    loaded = on.engine.info.adapters
    return {
        "enabled": FEATURE in on.engine.info.features,
        "adapters": {name: list(versions) for name, versions in loaded.versions().items()},
        "pinned": [f"{name}@{version}" for name, version in sorted(loaded.pinned)],
    }


async def load_adapter(on: WorkerParts, params: LoadAdapterParams, deadline: float) -> Mapping[str, Any]:
    from ...sync.adapters import read_adapter  # noqa: PLC0415 – torch

    _check(on)
    loaded = on.engine.info.adapters
    if loaded.has(params.name, params.version):
        raise InvalidField("version", params.version, f"one of {params.name!r} that this worker does not have")
    adapter = await asyncio.to_thread(read_adapter, Path(params.path), params.name, params.version)
    await on.follower.adapters.load(adapter)
    if params.pinned:
        loaded.pinned.add((params.name, params.version))
    return await adapters(on, NoParams(), deadline)


async def unload_adapter(on: WorkerParts, params: UnloadAdapterParams, deadline: float) -> Mapping[str, Any]:
    _check(on)
    loaded = on.engine.info.adapters
    versions = loaded.versions().get(params.name, ())
    if params.version is not None:
        versions = tuple(version for version in versions if version == params.version)
    if not versions:
        has = {name: list(there) for name, there in loaded.versions().items()}
        raise InvalidField("name", params.name, f"an adapter, and version, that this worker has: {has or 'none'}")
    if used := [version for version in versions if loaded.used(params.name, version)]:
        raise RequestRefused(f"unload_adapter: samples use {params.name}@{used[0]}; wait for them, or cancel them")
    on.follower.adapters.dismiss(params.name, max(versions))
    for version in versions:
        await on.follower.adapters.unload(params.name, version)
        loaded.pinned.discard((params.name, version))
    return await adapters(on, NoParams(), deadline)


def _check(on: WorkerParts) -> None:
    if FEATURE not in on.engine.info.features:
        raise RequestRefused(NOT_ENABLED)
