"""LoRA adapters on a worker: loads new versions into its engine and unloads superseded ones."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from ...messages.errors import EngineDead, EngineError, InvalidField, RequestRefused
from ...messages.model import WeightAnnouncement
from ...sync.transfer import Ledger, TransferOrder, TransferReport
from ..engine import FEATURE, NOT_ENABLED, Engine, LoadedAdapters, adapter_names
from ..gate import WeightsTurn

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

log = logging.getLogger(__name__)
ASK_S = 1.0
"""Seconds until one that could not be had is tried again; twice as many each time."""
LOAD_S = 60.0
"""Seconds that an engine may take to load or unload an adapter."""


class AdapterFollower:
    """Keeps one engine's adapters as new as the pool's."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine, self._ledger = engine, ledger
        self._refused: dict[str, int] = {}  # versions that this engine cannot load: not asked for again
        self._pauses: dict[str, tuple[float, float]] = {}  # name -> when to try again, and how long to wait after that
        self._lines: Any = None

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

    async def keep_up(self, worker_id: str, turn: WeightsTurn) -> bool:
        """Unload superseded versions, and get one that the pool has and this engine lacks. Returns whether one came."""
        if not self.any:
            return False
        loaded = self._engine.info.adapters
        await self._retire(loaded)
        for name, version in (await self._ledger.adapters()).items():
            after, pause_s = self._pauses.get(name, (0.0, ASK_S))
            if loaded.newest(name) >= version or self._refused.get(name, 0) >= version or time.monotonic() < after:
                continue
            holder = await self._ledger.adapter_holder(name)
            if holder is None or holder.version != version:
                continue
            order = TransferOrder.from_holders(holder, (), "", worker_id, timeout_s=LOAD_S)
            async with turn.take("an adapter"):
                report = await self._take(order, name)
            if report.ok:
                self._pauses.pop(name, None)
                return True
            log.info("adapter %s@%s could not be taken: %s: %s", name, version, report.phase, report.error)
            self._pauses[name] = time.monotonic() + pause_s, min(2 * pause_s, LOAD_S)
        return False

    def concerned(self, announcement: WeightAnnouncement) -> bool:
        """Whether to take part in the transfer of an adapter. A worker that cannot load any does, to say so."""
        if FEATURE not in self._engine.info.features:
            return True
        return self._engine.info.adapters.newest(announcement.adapter) < announcement.version

    async def take(self, announcement: WeightAnnouncement, worker_id: str) -> TransferReport:
        """Receive, verify and load the version that a transfer brings. Requests go on running."""
        report = await self._take(TransferOrder.of_announcement(announcement, worker_id), announcement.adapter)
        if not report.ok:
            what = f"{announcement.adapter}@{announcement.version}"
            log.warning("adapter %s was refused in %s: %s", what, report.phase, report.error)
        return report

    async def _take(self, order: TransferOrder, name: str) -> TransferReport:
        from ...sync.adapters import receive_adapter  # noqa: PLC0415 – torch: only where adapters are published
        from ...sync.wire import Lines  # noqa: PLC0415

        version = order.version
        if FEATURE not in self._engine.info.features:
            return TransferReport(ok=False, phase="load", error=NOT_ENABLED)
        self._lines = self._lines or Lines(None, 0, 1)
        try:
            adapter = await asyncio.to_thread(receive_adapter, self._lines, order, name)
        except Exception as error:  # torch may raise anything: it goes into the report
            return TransferReport(ok=False, phase="receive", error=f"{type(error).__name__}: {error}")
        try:
            await self.load(adapter)
        except EngineDead as error:
            return TransferReport(ok=False, phase="rendezvous", error=str(error))
        except (EngineError, TimeoutError) as error:
            self._refused[name] = version
            why = str(error) or f"the engine did not load it within {LOAD_S:g} s"
            return TransferReport(ok=False, phase="load", error=why)
        nbytes = sum(tensor.nbytes for tensor in adapter.tensors.values())
        return TransferReport(ok=True, phase="done", tensors=len(adapter.tensors), nbytes=nbytes, way="pull")

    async def _retire(self, loaded: LoadedAdapters) -> None:
        for name, version in loaded.superseded():
            try:
                await self.unload(name, version)
            except (EngineError, TimeoutError) as error:
                log.info("adapter %s@%s stays in the engine for now: %s", name, version, error)

    async def load(self, adapter: Adapter) -> None:
        """Load one version, from wherever it is. Raises EngineError or TimeoutError."""
        from ...sync.adapters import PINNED  # noqa: PLC0415 – torch

        pinned = adapter.config.pop(PINNED, False)
        async with asyncio.timeout(LOAD_S):
            await self._engine.load_adapter(adapter)
        self._engine.info.adapters.add(adapter.name, adapter.version)
        if pinned:
            self._engine.info.adapters.pinned.add((adapter.name, adapter.version))

    async def unload(self, name: str, version: int) -> None:
        """Unload one version. Raises EngineError or TimeoutError; then the engine still has it."""
        loaded = self._engine.info.adapters
        loaded.remove(name, version)
        try:
            async with asyncio.timeout(LOAD_S):
                await self._engine.unload_adapter(name, version)
        except (EngineError, TimeoutError):
            loaded.add(name, version)
            raise
