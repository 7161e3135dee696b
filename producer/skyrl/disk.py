"""Weights from a folder: read here, published to the whole pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...messages.errors import InvalidField
from .lora import LoraMethods

FORMATS = (None, "auto", "safetensors", "snapshot")


class DiskMethods(LoraMethods):
    """See SkyRLEngine."""

    async def load_weights_from_disk(
        self, model_path: str, load_format: str | None = None, flush_cache: bool = True
    ) -> tuple[bool, str]:
        """Publish what a folder of this host has as the next version: a safetensors checkpoint, or a snapshot.

        load_format: what it must be; None and "auto" take what is found. Every tensor is compared with its digest, as
        in any sync; workers that come later get it, too. For folders that only workers see there is
        `rolloutmq control load`. Returns (True, ""). Raises InvalidField, SnapshotError, WeightSyncError.
        """
        if load_format not in FORMATS:
            raise InvalidField("load_format", load_format, f"one of {', '.join(map(str, FORMATS))}")
        await self.client()
        async with self._sync_turn:
            publisher = await self._weight_publisher()
            version = publisher.last_version + 1
            handle = await asyncio.to_thread(_publish, publisher, version, Path(model_path), load_format)
            await self._settled(handle)
        if flush_cache:
            await self.flush_caches()
        return True, ""


def _publish(publisher: Any, version: int, path: Path, wanted: str | None) -> Any:
    from ...sync.disk.checkpoint import checkpoint_format  # noqa: PLC0415 – torch
    from ...sync.receive import open_version  # noqa: PLC0415

    found = checkpoint_format(path)
    if wanted not in (None, "auto", found):
        raise InvalidField("load_format", wanted, f"{found!r}, which {path} has")
    if found not in ("safetensors", "snapshot"):
        raise InvalidField("model_path", str(path), f"a checkpoint or one version of a snapshot folder, not {found}")
    with open_version(str(path), version) as opened:
        return publisher.publish(version, _tensors(opened))


def _tensors(opened: Any) -> Iterator[tuple[str, Any]]:
    for spec, flat in opened:
        yield spec.name, flat
