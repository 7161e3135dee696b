"""LoRA adapters on a worker: which versions its engine has, which samples use them, and how new ones come."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

from ...messages.errors import EngineDead, EngineError, InvalidField, RequestRefused
from ...messages.model.jobs import GenerateJob
from ...messages.model.weights import WeightAnnouncement
from ...sync.transfer.ledger import Ledger
from ...sync.transfer.order import TransferReport

if TYPE_CHECKING:
    from ..engine.protocol import Engine

log = logging.getLogger(__name__)
FEATURE = "lora"
"""Of EngineInfo.features: the engine was started for adapters."""
NOT_ENABLED = "LoRA is not enabled on this worker's engine: start the worker with --max-lora-rank"
ASK_S = 1.0
"""What is missing is asked for this often."""
LOAD_S = 60.0
"""How long an engine may take to load or unload an adapter."""


class AdapterUse:
    """A sample's hold on one version of an adapter: as long as it exists the engine keeps that version."""

    __slots__ = ("__weakref__", "name", "version")

    def __init__(self, name: str, version: int) -> None:
        self.name, self.version = name, version


class LoadedAdapters:
    """The adapter versions of one life of an engine."""

    def __init__(self) -> None:
        self._versions: dict[str, set[int]] = {}
        self._uses: WeakSet[AdapterUse] = WeakSet()
        self.pinned: set[tuple[str, int]] = set()
        """Versions that stay when newer ones come."""

    def versions(self) -> dict[str, tuple[int, ...]]:
        """Name -> every version that is here, oldest first."""
        return {name: tuple(sorted(versions)) for name, versions in self._versions.items() if versions}

    def used(self, name: str, version: int) -> bool:
        """Whether a sample holds this very version."""
        return any((use.name, use.version) == (name, version) for use in self._uses)

    def newest(self, name: str) -> int:
        """The newest version of an adapter, 0 if the engine has none."""
        return max(self._versions.get(name, ()), default=0)

    def current(self) -> dict[str, int]:
        """Name -> newest version."""
        return {name: max(versions) for name, versions in self._versions.items() if versions}

    def add(self, name: str, version: int) -> None:
        """The engine has it now."""
        self._versions.setdefault(name, set()).add(version)

    def remove(self, name: str, version: int) -> None:
        """The engine will not have it much longer: no sample may begin with it."""
        self._versions.get(name, set()).discard(version)

    def has(self, name: str, version: int) -> bool:
        """Whether requests may use this very version."""
        return version in self._versions.get(name, ())

    def use(self, name: str, before: int = 0) -> AdapterUse:
        """For a leg of a sample: version `before`, which it went on with so far, if that is here; else the newest."""
        use = AdapterUse(name, before if self.has(name, before) else self.newest(name))
        self._uses.add(use)
        return use

    def superseded(self) -> list[tuple[str, int]]:
        """Versions that are not the newest, that no sample uses, and that are not pinned."""
        used = {(use.name, use.version) for use in self._uses} | self.pinned
        return [
            (name, version)
            for name, versions in self._versions.items()
            for version in sorted(versions)
            if version < max(versions) and (name, version) not in used
        ]


class AdapterMissing(RequestRefused):
    """The job's adapter, or that version of it, is not on this worker. It may be in the pool."""

    def __init__(self, adapter: str, text: str) -> None:
        super().__init__(text)
        self.adapter = adapter


def check(job: GenerateJob, adapters: LoadedAdapters, features: frozenset[str]) -> None:
    """Raises AdapterMissing for a job that cannot run with these adapters."""
    if job.lora is None:
        return
    if FEATURE not in features:
        unable = InvalidField("lora", job.lora, NOT_ENABLED)
        raise AdapterMissing(job.lora, str(unable))
    newest = adapters.newest(job.lora)
    if newest >= max(1, job.min_adapter_version):
        return
    if newest:
        text = str(InvalidField("min_adapter_version", job.min_adapter_version, f"at most {newest} of {job.lora!r}"))
    else:
        text = str(InvalidField("lora", job.lora, f"an adapter that this worker has: {_names(adapters.current())}"))
    raise AdapterMissing(job.lora, text)


def _names(adapters: dict[str, int]) -> str:
    return ", ".join(repr(name) for name in sorted(adapters)) or "none"


class AdapterFollower:
    """Keeps one engine's adapters as new as the pool's."""

    def __init__(self, engine: Engine, ledger: Ledger) -> None:
        self._engine, self._ledger = engine, ledger
        self._refused: dict[str, int] = {}  # versions that this engine cannot load: not asked for again
        self._asked = 0.0

    def dismiss(self, name: str, version: int) -> None:
        """Do not ask the pool for this version, nor for an older one, again."""
        self._refused[name] = max(version, self._refused.get(name, 0))

    async def refusal(self, name: str) -> RequestRefused | None:
        """Why no worker of the pool can run a job for this adapter, or None if one could, now or later."""
        known = await self._ledger.adapters()
        if name in known:
            return None
        there = f"an adapter that was published to this pool: {_names(known)}"
        if FEATURE not in self._engine.info.features:
            there += "; nor is LoRA enabled on this worker's engine"
        return RequestRefused(str(InvalidField("lora", name, there)))

    async def keep_up(self, worker_id: str) -> None:
        """Give up what is superseded, and ask for what the pool has and this engine lacks."""
        if FEATURE not in self._engine.info.features:
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
        """Whether to take part in the transfer of an adapter. Only a catch-up is not for those who cannot load it."""
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
        from ...sync.adapters.transfer import Fetch  # noqa: PLC0415 – torch: only where adapters are published

        name, version = announcement.adapter, announcement.version
        if FEATURE not in self._engine.info.features:
            return TransferReport(ok=False, phase="load", error=NOT_ENABLED)
        fetch = Fetch(announcement)
        try:
            adapter = await asyncio.to_thread(fetch.run)
        except Exception as error:  # whatever torch raises belongs into the report
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
