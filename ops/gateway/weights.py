"""A pool's weights and adapters as tenants bring them to a gateway: published like any trainer's, from this process."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...messages.errors import InvalidField, WeightSyncError
from ..http import Refused
from .facts import PoolFacts
from .settings import Settings

if TYPE_CHECKING:
    from ...producer.skyrl import SkyRLEngine
    from ...sync import WeightPublisher

log = logging.getLogger(__name__)
LOOK_S = 0.05


def below(root: Path | None, path: Any) -> Path:
    """The folder `path`, if it and all that is in it are below `root`, links resolved. A relative one is in `root`.

    Raises InvalidField, and Refused for a folder that is not there (404) or elsewhere (403).
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidField("path", path, "the path of a folder")
    if root is None:
        text = "This gateway takes no weights from folders: its operator has to say from which, with --weights-from."
        raise Refused(403, "no_weights_from", text)
    try:
        top, folder = root.resolve(strict=True), (root / path).resolve(strict=True)
        inside = folder.is_relative_to(top)
        inside = inside and all(one.resolve().is_relative_to(top) for one in folder.rglob("*"))
    except (OSError, RuntimeError):
        raise Refused(404, "no_such_folder", f"There is no folder {path!r} at the gateway.", param="path") from None
    if not inside:
        text = f"Weights come from below {root}, and so do the files that links there lead to."
        raise Refused(403, "not_below_weights_from", text, param="path")
    return folder


class Weights:
    """Publishes what comes for one pool, one thing after the other.

    Guarantees: what `load` returns is served, verified, by every worker that could take it, is copied out of the
    trainer's folder, and is in the folder of snapshots if there is one. So the trainer may delete its folder, and
    workers that come later get the version.
    """

    def __init__(self, settings: Settings, pool: str, facts: PoolFacts) -> None:
        self._url, self._pool, self._facts = settings.redis, pool, facts
        self._snapshots = settings.snapshots / pool if settings.snapshots is not None else None
        self._device = settings.receiver_device
        self._turn = asyncio.Lock()
        self._came = False
        self._said: int | None = None
        self.pulled: dict[str, str] = {}
        """What a trainer calls the folder of its servers -> the folder that it told them to copy there."""
        self._engine: SkyRLEngine | None = None
        self._publisher: WeightPublisher | None = None

    async def engine(self) -> SkyRLEngine:
        """What receives and publishes. The first call imports torch. Raises Refused where there is none."""
        if self._engine is None:
            try:
                from ...producer.skyrl import SkyRLEngine  # noqa: PLC0415 – torch
                from ...sync import WeightPublisher  # noqa: PLC0415

                self._publisher = await asyncio.to_thread(
                    WeightPublisher, self._url, self._pool, leader=True, snapshots=self._snapshots
                )
            except ImportError as error:
                raise Refused(501, "no_torch", f"This gateway takes no weights: {error}.") from None
            self._engine = SkyRLEngine(self._url, self._pool, publisher=self._publisher, receiver_device=self._device)
        return self._engine

    async def load(self, folder: Path, said: int | None) -> int:
        """Publish a folder, and return its version: `said`, if that is above all others, else the next number, because
        a trainer that goes on after a crash begins again where it was saved.

        Raises InvalidField, WeightSyncError.
        """
        async with self._turn:
            engine = await self.engine()
            version = await self._number(engine, said)
            before = self._written()
            await engine.load_weights_from_disk(str(folder))
            await self._saved(before, version)
            await self._facts.read(0.0)  # whoever asks next is told
        return version

    async def join(self, **group: Any) -> None:
        """Join a trainer's group, in the place of an older one, as SkyRLEngine does. Raises InvalidField."""
        async with self._turn:
            await (await self.engine()).init_weight_update_communicator(override_existing=True, **group)

    async def receive(self, update: dict[str, Any], said: int | None = None) -> None:
        """Take tensors in SkyRL's forms. They are served when the update ends, or begins anew.

        said: the version's number. Raises InvalidField, TransferTimeout.
        """
        async with self._turn:
            engine, self._said = await self.engine(), said
            await engine.update_named_weights(update)
            self._came = True

    async def end(self, said: int | None = None) -> int:
        """Publish what was received, if anything was, and return the newest version. Raises WeightSyncError."""
        async with self._turn:
            version = 0
            if self._engine is not None and self._came:
                version = await self._number(self._engine, self._said if said is None else said)  # it publishes, too
                self._came = False
            if (committed := (await self._facts.read(0.0)).committed) < version:
                raise WeightSyncError("what was received could not be published before: send it again")
            return committed

    async def _number(self, engine: SkyRLEngine, said: int | None) -> int:
        last = self._publisher.last_version if self._publisher is not None else 0
        newest = max((await self._facts.read(0.0)).newest, last)
        version = said if said is not None and said > newest else newest + 1
        if said not in {None, version}:
            log.warning("pool %s: what its trainer calls version %d is version %d", self._pool, said, version)
        await engine.update_weight_version(version, abort_all_requests=False)
        return version

    def _written(self) -> tuple[int, int]:
        """How many versions are in the folder of snapshots, and how many could not be written there."""
        found = self._publisher
        return (found.snapshots_saved, found.snapshots_failed) if found is not None else (0, 0)

    async def _saved(self, before: tuple[int, int], version: int) -> None:
        """Return when a version is in the folder of snapshots."""
        while self._snapshots is not None:
            if (now := self._written()) != before:
                if now[1] > before[1]:
                    raise WeightSyncError(f"version {version} is served, but not saved in {self._snapshots}")
                return
            await asyncio.sleep(LOOK_S)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Publish an adapter's folder as its newest version. Raises InvalidField, WeightSyncError."""
        async with self._turn:
            await (await self.engine()).load_lora_adapter(name, str(folder))
            await self._facts.read(0.0)

    async def unload_adapter(self, name: str) -> None:
        """Have workers forget an adapter. Raises for one that is unknown or in use."""
        async with self._turn:
            await (await self.engine()).unload_lora_adapter(name)

    async def close(self) -> None:
        """Nobody gets anything from here any more."""
        engine, publisher, self._engine, self._publisher = self._engine, self._publisher, None, None
        if engine is not None:
            await engine.teardown()
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
