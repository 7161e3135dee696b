"""LoRA adapters on a worker: loads new versions into its engine and unloads superseded ones."""

from __future__ import annotations

import asyncio
import logging
import time

from ...messages.errors import EngineDead, EngineError, InvalidField, RequestRefused
from ...messages.model import WeightAnnouncement
from ...sync.transfer import Ledger, TransferReport
from ..engine import FEATURE, NOT_ENABLED, Engine, LoadedAdapters, adapter_names

log = logging.getLogger(__name__)
ASK_S = 1.0
"""Seconds between requests for missing adapters."""
LOAD_S = 60.0
"""Seconds that an engine may take to load or unload an adapter."""


class AdapterFollower:
    """Keeps one engine's adapters as new as the pool's."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine, self._ledger = engine, ledger
        self._refused: dict[str, int] = {}  # versions that this engine cannot load: not asked for again
        self._asked = 0.0

    @property
    def any(self) -> bool:
        """Whether this engine can have adapters at all."""
        return FEATURE in self._engine.info.features

    def dismiss(self, name: str, version: int) -> None:
        """Do not ask the pool for this version, nor for an older one, again."""
        self._refused[name] = max(version, self._refused.get(name, 0))

    async def committed(self) -> dict[str, int]:
        """The adapters of the pool, each with its newest version."""
        return await self._ledger.adapters()

    async def refusal(self, name: str) -> RequestRefused | None:
        """Why no worker of the pool can run a job for this adapter, or None if one could, now or later."""
        known = await self._ledger.adapters()
        if name in known:
            return None
        there = f"an adapter that was published to this pool: {adapter_names(known)}"
        if FEATURE not in self._engine.info.features:
            there += "; nor is LoRA enabled on this worker's engine"
        return RequestRefused(str(InvalidField("lora", name, there)))

    async def keep_up(self, worker_id: str) -> None:
        """Unload superseded versions, and ask for versions that the pool has and this engine lacks."""
        if not self.any:
            return
        loaded = self._engine.info.adapters
        await self._retire(loaded)
        if time.monotonic() - self._asked < ASK_S:
            return
        self._asked = time.monotonic()
        for name, version in (await self._ledger.adapters()).items():
            if loaded.newest(name) < version and self._refused.get(name, 0) < version:
                await self._ledger.want(worker_id, loaded.newest(name), name)

    def concerned(self, announcement: WeightAnnouncement) -> bool:
        """Whether to take part in the transfer of an adapter.

        A worker that cannot load adapters takes part, to say so, unless the transfer is a catch-up.
        """
        if FEATURE not in self._engine.info.features:
            return not announcement.catch_up
        return self._engine.info.adapters.newest(announcement.adapter) < announcement.version

    async def take(self, announcement: WeightAnnouncement) -> TransferReport:
        """Receive, verify and load the version that a sealed transfer brings. Requests go on running."""
        report = await self._take(announcement)
        if not report.ok:
            what = f"{announcement.adapter}@{announcement.version}"
            log.warning("adapter %s was refused in %s: %s", what, report.phase, report.error)
        return report

    async def _take(self, announcement: WeightAnnouncement) -> TransferReport:
        from ...sync.adapters import Fetch  # noqa: PLC0415 – torch: only where adapters are published

        name, version = announcement.adapter, announcement.version
        if FEATURE not in self._engine.info.features:
            return TransferReport(ok=False, phase="load", error=NOT_ENABLED)
        fetch = Fetch(announcement)
        try:
            adapter = await asyncio.to_thread(fetch.run)
        except Exception as error:  # torch may raise anything: it goes into the report
            return TransferReport(ok=False, phase=fetch.phase, error=f"{type(error).__name__}: {error}")
        loaded = self._engine.info.adapters
        try:
            async with asyncio.timeout(LOAD_S):
                await self._engine.load_adapter(adapter)
        except EngineDead as error:
            return TransferReport(ok=False, phase="rendezvous", error=str(error))
        except (EngineError, TimeoutError) as error:
            self._refused[name] = version
            why = str(error) or f"the engine did not load it within {LOAD_S:g} s"
            return TransferReport(ok=False, phase="load", error=why)
        loaded.add(name, version)
        self._asked = 0.0  # another one may be missing
        nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
        return TransferReport(ok=True, phase="done", tensors=len(adapter.tensors), nbytes=nbytes)

    async def _retire(self, loaded: LoadedAdapters) -> None:
        for name, version in loaded.superseded():
            loaded.remove(name, version)
            try:
                async with asyncio.timeout(LOAD_S):
                    await self._engine.unload_adapter(name, version)
            except (EngineError, TimeoutError) as error:
                log.info("adapter %s@%s stays in the engine for now: %s", name, version, error)
                loaded.add(name, version)
