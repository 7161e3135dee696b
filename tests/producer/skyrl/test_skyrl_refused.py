"""A sync that was refused, and what the next one is compared with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.pools.pool import worker
from support.pools.skyrl import engine
from support.pools.skyrl_trainer import NAMES, request, weights

from rolloutmq.messages.errors import WeightSyncError
from rolloutmq.producer.skyrl import IncompleteWeights, SkyRLEngine
from rolloutmq.worker.scripted.engine import ScriptedEngine


class Choosy(ScriptedEngine):
    """An engine that refuses versions with a tensor of the name "strange", as SGLang refuses what it does not know."""

    def load_weights(self, tensors: Any) -> None:
        found = dict(tensors)
        if "strange" in found:
            raise RuntimeError("no tensor is called strange")
        super().load_weights(found.items())


@pytest.fixture
async def it(redis_db: str) -> AsyncIterator[SkyRLEngine]:
    async with worker(redis_db, engine=Choosy()), engine(redis_db) as made:
        yield made


async def test_a_refused_sync_does_not_stop_the_next_correct_one(it: SkyRLEngine) -> None:
    await it.update_named_weights(request(1, strange=torch.ones(2)))
    with pytest.raises(WeightSyncError, match="strange"):
        await it.reset_prefix_cache()
    await it.update_named_weights(request(2))
    await it.reset_prefix_cache()
    handle = await it.start_weight_transfer(request(3, strange=torch.ones(2)))
    with pytest.raises(WeightSyncError, match="strange"):
        await handle.wait()
    await it.update_named_weights(request(4))
    await it.reset_prefix_cache()
    assert await it.get_weight_version() == "4"
    await it.update_named_weights(request(5, NAMES[:2]))
    with pytest.raises(IncompleteWeights, match=NAMES[2]):
        await it.reset_prefix_cache()


async def test_a_load_from_disk_is_a_version_like_a_sync(it: SkyRLEngine, tmp_path: Path) -> None:
    save_file(weights(0), tmp_path / "model.safetensors")
    await it.update_named_weights(request(1, lm_extra=torch.ones(2)))
    await it.reset_prefix_cache()
    await it.update_weight_version(7)
    await it.update_named_weights(request(2, NAMES[:1]))
    await it.load_weights_from_disk(str(tmp_path))
    assert await it.get_weight_version() == "7", "the number that was named for the next version"
    await it.reset_prefix_cache()
    assert await it.get_weight_version() == "7", "tensors from before the load do not come after it"
    await it.update_named_weights(request(3))  # the folder has no lm_extra, so a sync without it is whole
    await it.reset_prefix_cache()
    assert await it.get_weight_version() == "8"
