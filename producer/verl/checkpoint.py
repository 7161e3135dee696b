"""verl's checkpoint engine over a pool, for trainers that do not share their GPUs with replicas. Needs verl."""

from __future__ import annotations

from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ...messages.errors import FeatureUnavailable
from .settings import NAME, PoolSettings
from .steps import tell_servers
from .weights import PoolWeights


@CheckpointEngineRegistry.register(NAME)
class PoolCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """`checkpoint_engine.backend: rolloutmq`. The trainer's rank 0 publishes; see `PoolWeights` for what holds.

    Args:
        bucket_size: verl's, in bytes; the publisher's own is `publisher.bucket_bytes`.
        is_master: whether this is the trainer's rank 0.
        settings: fields of `PoolSettings` (`checkpoint_engine.engine_kwargs.rolloutmq`).
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self._weights = PoolWeights(PoolSettings.of({NAME: settings}), leader=is_master, tell=tell_servers)

    def prepare(self) -> dict[str, Any]:
        """Return nothing that another process needs: senders and receivers meet by the pool's Redis."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments for `init_process_group` of either side."""
        return {}, {}

    def init_process_group(self, **_kwargs: Any) -> None:
        """Do nothing; see `prepare`."""

    def finalize(self) -> None:
        """Do nothing: the publisher's group stands until its members change."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish them, and return when the version is committed. Raises WeightSyncError if no worker took it."""
        return await self._weights.publish(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        """Raises FeatureUnavailable: the pool's workers receive, no process of verl."""
        raise FeatureUnavailable("receive_weights", global_steps, "nothing: the pool's workers receive weights")
