"""Commands about the weights: set their version, audit every bit of them, save them, load them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ...messages.errors import EngineError, InvalidField, RequestRefused
from ...messages.model import AuditParams, LoadParams, SaveParams, SetVersionParams
from ...messages.remote import open_url
from ...sync.transfer import Ledger
from ..engine import Engine
from ..generation import Generation
from ..weights import WeightFollower, folder_order
from .files import upload
from .queue import Handler

log = logging.getLogger(__name__)
SERVES_S, LOOK_S = 10.0, 0.02
"""Whoever has weights loaded is told, within so many seconds, whether the worker serves them."""


class WeightCommands:
    """The commands about the weights, for one worker. ledger: of its pool. state(): the worker's, as in its status."""

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        follower: WeightFollower,
        ledger: Ledger,
        state: Callable[[], str],
    ) -> None:
        self._engine, self._generation, self._follower, self._ledger = engine, generation, follower, ledger
        self._state = state

    def handlers(self) -> dict[str, Handler]:
        """Each action and the function that does it."""
        return {"set_version": self._set_version, "audit": self._audit, "save": self._save, "load": self._load}

    async def _set_version(self, params: SetVersionParams, deadline: float) -> Mapping[str, Any]:
        async with self._whole("set_version", deadline) as before:
            if params.version != before:
                if before < (newest := await self._ledger.committed()):
                    raise RequestRefused(
                        f"set_version: this worker has {before}, and is yet to get the pool's {newest}"
                    )
                await self._reserve("set_version", params.version, f"version {before}")
                self._generation.state.renamed(params.version)
                log.info("what was version %s is called %s from now on, by command", before, params.version)
            return {"version": params.version, "before": before}

    async def _audit(self, params: AuditParams, deadline: float) -> Mapping[str, Any]:
        async with self._whole("audit", deadline) as version:
            found = await self._engine.operate("audit", {"version": version, "names": params.names})
        info = self._engine.info
        return {
            **found,
            "clean": not any(found["found"].values()),
            "version": version,
            "kind": f"{info.model} {info.dtype} tp{info.tp_size} {info.name}-{info.version}",
        }

    async def _save(self, params: SaveParams, deadline: float) -> Mapping[str, Any]:
        if params.upload:
            await asyncio.to_thread(open_url, params.upload, "upload to")  # before anything is written
        async with self._whole("save", deadline) as version:
            if params.format == "safetensors":
                saved = await self._engine.operate("export", {"path": params.path, "version": version})
            else:
                folder = str(Path(params.path) / f"sharded-v{version:012d}")
                saved = await self._engine.operate("save_sharded", {"path": folder, "version": version})
        result = {**saved, "format": params.format, "version": version}
        if params.upload:
            result |= await asyncio.to_thread(upload, Path(str(saved["path"])), params.upload)
        return result

    async def _load(self, params: LoadParams, deadline: float) -> Mapping[str, Any]:
        from ...sync.disk.checkpoint import checkpoint_format  # noqa: PLC0415 – torch

        found = await asyncio.to_thread(checkpoint_format, params.path)
        if found == "snapshots":
            raise InvalidField("path", params.path, "one of the versions in it, v000000000012 or the like")
        if params.format not in ("auto", found):
            raise InvalidField("format", params.format, f"{found!r} or 'auto': that is what is in {params.path}")
        self._untouched("load")
        await self._reserve("load", params.version, f"{found} {params.path}")
        if found == "sharded":
            result = await self._load_sharded(params, deadline)
        else:
            result = await self._load_named(params, deadline)
        log.info("version %s was loaded from %s, by command", params.version, params.path)
        self._generation.state.doubted()  # it serves when it has compared the version with the pool's
        for _ in range(round(SERVES_S / LOOK_S)):
            if self._generation.state.in_service:
                break
            await asyncio.sleep(LOOK_S)
        return {**result, "format": found, "version": params.version, "state": self._state()}

    async def _load_named(self, params: LoadParams, deadline: float) -> dict[str, Any]:
        nbytes = await asyncio.to_thread(_size, Path(params.path))
        report = await self._follower.load(folder_order(params.path, params.version, nbytes))
        if not report.ok:
            raise EngineError(f"load: {report.phase}: {report.error}")
        return {"tensors": report.tensors, "nbytes": report.nbytes, "verified": report.readback}

    async def _load_sharded(self, params: LoadParams, deadline: float) -> dict[str, Any]:
        async with self._whole("load", deadline) as before:
            self._untouched("load")
            if before >= params.version:  # while the turn was waited for
                raise EngineError(f"load: version {before} came first")
            async with self._generation.in_flight.quiet():
                checked = await self._engine.operate("check_sharded", {"path": params.path})
                try:
                    await self._engine.operate("load_sharded", {"path": params.path})
                except BaseException:
                    self._generation.state.broken()  # half of it may be there
                    raise
                self._generation.state.has(params.version)
        return {"tensors": checked["tensors"], "verified": True}

    async def _reserve(self, what: str, version: int, of: str) -> None:
        """Take a version number that nobody has used: cached prefixes and samples are tagged with it."""
        here = self._generation.version
        taken = here if version <= here else await self._ledger.reserve(version, of)
        if taken:
            raise InvalidField(f"{what}: version", version, f"above {max(taken, here)}: that number is taken")

    def _untouched(self, what: str) -> None:
        if not (gate := self._generation.state.weights).is_open:
            raise RequestRefused(f"{what}: the engine is {', '.join(gate.reasons)}")

    @asynccontextmanager
    async def _whole(self, what: str, deadline: float) -> AsyncIterator[int]:
        """Give the engine's version, and keep it from changing inside the block."""
        state = self._generation.state
        async with state.turn.take(what, deadline):
            if "asleep" in state.weights.reasons:
                raise RequestRefused(f"{what}: the engine's weights are asleep")
            if state.quarantined:
                raise RequestRefused(f"{what}: the engine's weights are no version: it waits for one")
            yield state.version


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
