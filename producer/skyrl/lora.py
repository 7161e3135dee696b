"""LoRA adapters from folders, for the whole pool."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ...messages.errors import WeightSyncError
from .chat import ChatMethods


class LoraMethods(ChatMethods):
    """See SkyRLEngine."""

    async def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> tuple[bool, str]:
        """Publish the adapter in a folder of this host (as PEFT saves it) as the newest version of `lora_name`.

        Prompts ask for it by `lora` in their sampling parameters. A published adapter stays, pinned or not, and workers
        that come later get it, too. Returns (True, ""). Raises WeightSyncError if no worker has taken it, InvalidField.
        """
        from ...sync.adapters import read_adapter  # noqa: PLC0415 – torch
        from ...sync.transfer import Ledger  # noqa: PLC0415

        client, publisher = await self.client(), await self._weight_publisher()
        newest = (await Ledger(client.broker.redis, self.pool).newest_adapters()).get(lora_name, 0)
        adapter = await asyncio.to_thread(read_adapter, Path(lora_path), lora_name, newest + 1)
        config: Any = adapter.config
        handle = await asyncio.to_thread(publisher.publish_adapter, lora_name, newest + 1, adapter.tensors, config)
        report = await asyncio.to_thread(handle.wait)
        if report.state != "committed":
            why = "; ".join(f"{worker}: {reason}" for worker, reason in sorted(report.failures.items()))
            raise WeightSyncError(f"adapter {lora_name} is loaded by nobody: {why or report.state}")
        return True, ""

    async def unload_lora_adapter(self, lora_name: str) -> tuple[bool, str]:
        """Take all of its versions out of the workers' engines. Raises while samples use it, and for an unknown one."""
        await self.ask("unload_adapter", {"name": lora_name})
        return True, ""
