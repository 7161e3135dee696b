"""verl's replica over a pool, and the Ray actor that is its server. Needs verl."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from ...messages.errors import FeatureUnavailable
from .server import PoolServer
from .settings import NAME, PoolSettings
from .steps import ACTOR


class PoolServerActor(PoolServer):
    """The server as verl's clients call it. To a checkpoint engine it is also the replica's only worker."""

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """See `PoolServer.generate`."""
        return TokenOutput(**await super().generate(*args, **kwargs))

    async def execute_checkpoint_engine(self, method: str, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        """Do nothing: the pool's workers receive weights themselves."""
        return {}

    async def update_weights(self, global_steps: int | None = None) -> None:
        """Do nothing; see `execute_checkpoint_engine`."""


class PoolReplica(RolloutReplica):  # type: ignore[misc]
    """A replica without GPUs: a client of the pool in a Ray actor. All replicas share the pool's workers.

    What verl does with the memory, the caches and the running requests of its own engines does nothing here, because
    the workers do it when a version arrives: they drop prefixes of older weights, and interrupt and continue samples.
    """

    def __init__(  # noqa: PLR0917 – verl's own order
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        if is_reward_model or is_teacher_model:
            role = "is_reward_model" if is_reward_model else "is_teacher_model"
            raise FeatureUnavailable(
                role, True, "False: the pool serves the policy; let sglang or vllm serve this model"
            )
        super().__init__(replica_rank, config, model_config, gpus_per_node, name_suffix=name_suffix)
        if self.config.enable_rollout_routing_replay:
            raise FeatureUnavailable("enable_rollout_routing_replay", True, "False with rollout.name=rolloutmq")

    async def init_hybrid(self, worker_group: Any) -> None:
        """Start the server. The trainer's workers stay the trainer's."""
        self.rollout_mode = RolloutMode.HYBRID
        await self.launch_servers()

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> None:
        """Like `init_hybrid`."""
        await self.init_hybrid(worker_group)

    async def init_standalone(self) -> None:
        """Start the server; no GPU is reserved."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_colocated(self, resource_pool: Any) -> None:
        """Raises FeatureUnavailable: only other models than the policy are served so."""
        raise FeatureUnavailable("init_colocated", self.replica_rank, "init_hybrid or init_standalone")

    async def launch_servers(self) -> None:
        """Start the Ray actor, and wait until it is there."""
        options = {"name": f"{ACTOR}{self.replica_rank}{self.name_suffix}", "max_concurrency": self.max_concurrency}
        server = (
            ray.remote(PoolServerActor)
            .options(num_cpus=0, **options)
            .remote(
                PoolSettings.of(self.config.engine_kwargs),
                prompt_length=self.config.prompt_length,
                response_length=self.config.response_length,
                max_model_len=self.config.max_model_len,
                logprobs_mode=self.config.logprobs_mode,
            )
        )
        await server.__ray_ready__.remote()
        self.servers = self.workers = [server]
        self._server_handle, self._server_address = server, f"{NAME}:{self.replica_rank}"

    async def wake_up(self) -> None:
        """Do nothing: the pool is awake."""

    async def sleep(self) -> None:
        """Do nothing: the trainer's GPUs hold nothing of the pool."""

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Do nothing: workers interrupt and continue what runs when a version arrives."""

    async def resume_generation(self) -> None:
        """Do nothing; see `abort_all_requests`."""

    async def clear_kv_cache(self) -> None:
        """Do nothing: prefixes are never shared across versions."""

    async def release_kv_cache(self) -> None:
        """Do nothing; see `sleep`."""

    async def resume_kv_cache(self) -> None:
        """Do nothing; see `sleep`."""

    async def start_profile(self, **_kwargs: Any) -> None:
        """Do nothing: `rolloutmq control profile start` profiles workers."""

    async def stop_profile(self) -> None:
        """Do nothing; see `start_profile`."""
