"""verl's server adapter over a pool: the trainer's ranks hand it their weights. Needs verl."""

from __future__ import annotations

import os
from typing import Any

from verl.workers.rollout.base import BaseRollout

from ...messages.errors import FeatureUnavailable
from .settings import PoolSettings
from .steps import tell_servers
from .weights import PoolWeights


class PoolServerAdapter(BaseRollout):  # type: ignore[misc]
    """In each rank of the trainer, where weights go straight from the training engine (`checkpoint_engine.backend:
    naive`, verl's default). Rank 0 publishes; see `PoolWeights` for what holds."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, replica_rank: int = -1, **kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        rank = int(os.environ.get("RANK", "0"))
        self.replica_rank = rank if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank == 0
        self._weights = PoolWeights(
            PoolSettings.of(self.config.engine_kwargs), leader=self.is_leader_rank, tell=tell_servers
        )

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the trainer's GPU holds nothing of the pool."""

    async def release(self) -> None:
        """Do nothing; see `resume`."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **_kwargs: Any,
    ) -> None:
        """Publish them, and return when the version is committed.

        Raises WeightSyncError if no worker took it, FeatureUnavailable for differences and for adapters.
        """
        if wire_format != "named_tensors":
            raise FeatureUnavailable("wire_format", wire_format, "named_tensors: whole versions are sent")
        if peft_config is not None:
            raise FeatureUnavailable(
                "peft_config", "a LoRA adapter", "None: set actor_rollout_ref.model.lora.merge=True"
            )
        await self._weights.publish(weights, global_steps)
