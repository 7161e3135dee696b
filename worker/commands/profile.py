"""An engine's profiler by command, and the traces it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...messages.model import StartProfileParams, StopProfileParams
from ..engine import Engine
from .queue import Handler
from .upload import check_url, upload


class ProfileCommands:
    """One worker's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handlers(self) -> dict[str, Handler]:
        """By action."""
        return {"start_profile": self._start, "stop_profile": self._stop}

    async def _start(self, params: StartProfileParams, deadline: float) -> Mapping[str, Any]:
        told: dict[str, Any] = {"activities": params.activities}
        if params.folder is not None:
            told["folder"] = params.folder
        if params.steps is not None:
            told["steps"] = params.steps
        return await self._engine.operate("start_profile", told)

    async def _stop(self, params: StopProfileParams, deadline: float) -> Mapping[str, Any]:
        if params.upload:
            await asyncio.to_thread(check_url, params.upload)
        result = dict(await self._engine.operate("stop_profile", {}))
        folder = Path(str(result["folder"]))
        if params.fetch_bytes:
            result["fetched"] = await asyncio.to_thread(_fetch, folder, list(result["files"]), params.fetch_bytes)
        if params.upload:
            result |= await asyncio.to_thread(upload, folder, params.upload)
        return result


def _fetch(folder: Path, names: list[str], most: int) -> dict[str, bytes]:
    """Whole files, the smallest first, as many as fit."""
    fetched: dict[str, bytes] = {}
    for file in sorted((folder / name for name in names), key=lambda each: each.stat().st_size):
        if file.stat().st_size > most:
            break
        fetched[file.name] = file.read_bytes()
        most -= len(fetched[file.name])
    return fetched
