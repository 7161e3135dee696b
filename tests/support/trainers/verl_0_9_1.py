"""The parts of verl 0.9.1 that `rolloutmq.producer.verl` extends: its classes' names and signatures, recorded.

verl needs Ray, which is too large for a test environment. These stand in for both. `check_signatures` is what holds
between them and the classes of the room; `examples/verl/agent_loop.py` runs with verl itself.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any


class BaseRollout:
    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh

    async def resume(self, tags: list[str]) -> Any: ...

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **kwargs: Any) -> Any: ...

    async def release(self) -> Any: ...


class RolloutReplica:
    def __init__(  # noqa: PLR0917
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        self.replica_rank, self.config, self.model_config = replica_rank, config, model_config
        self.name_suffix = f"_{name_suffix}" if name_suffix else ""

    max_concurrency = 1000

    async def init_hybrid(self, worker_group: Any) -> Any: ...

    async def init_hybrid_colocated(self, worker_group: Any, resource_pool: Any) -> Any: ...

    async def init_colocated(self, resource_pool: Any) -> Any: ...

    async def init_standalone(self) -> Any: ...

    async def launch_servers(self) -> Any: ...

    async def wake_up(self) -> Any: ...

    async def sleep(self) -> Any: ...

    async def abort_all_requests(self, reject_request: bool = False) -> Any: ...

    async def resume_generation(self) -> Any: ...

    async def clear_kv_cache(self) -> Any: ...

    async def release_kv_cache(self) -> Any: ...

    async def resume_kv_cache(self) -> Any: ...

    async def start_profile(self, **kwargs: Any) -> Any: ...

    async def stop_profile(self) -> Any: ...


class CheckpointEngine:
    def prepare(self) -> Any: ...

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> Any: ...

    def init_process_group(self, **kwargs: Any) -> Any: ...

    def finalize(self) -> Any: ...

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class Registry:
    """Of replicas and of checkpoint engines."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def register(self, name: str, loader: Any = None) -> Any:
        if loader is not None:
            self.known[name] = loader
            return None
        return lambda found: self.known.setdefault(name, found)


def modules() -> dict[str, ModuleType]:
    """verl's modules and Ray by name, for sys.modules."""
    replicas, engines = Registry(), Registry()
    contents: dict[str, dict[str, Any]] = {
        "ray": {"util": SimpleNamespace(list_named_actors=list)},
        "verl": {},
        "verl.workers": {},
        "verl.workers.rollout": {},
        "verl.workers.rollout.base": {"BaseRollout": BaseRollout, "_ROLLOUT_REGISTRY": {}},
        "verl.workers.rollout.replica": {
            "RolloutReplica": RolloutReplica,
            "RolloutReplicaRegistry": replicas,
            "RolloutMode": SimpleNamespace(HYBRID="hybrid", STANDALONE="standalone"),
            "TokenOutput": SimpleNamespace,
        },
        "verl.checkpoint_engine": {},
        "verl.checkpoint_engine.base": {"CheckpointEngine": CheckpointEngine, "CheckpointEngineRegistry": engines},
    }
    made = {}
    for name, inside in contents.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(inside)
    return made


def check_signatures(ours: type, recorded: type) -> None:
    """Every method of `recorded` is one of `ours`, is awaited alike, and takes what verl calls it with."""
    for name, theirs in inspect.getmembers(recorded, inspect.isroutine):
        if name.startswith("__") and not (name == "__init__" and name in vars(recorded)):
            continue
        mine = getattr(ours, name)
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(theirs), name
        given, taken = inspect.signature(theirs).parameters, inspect.signature(mine).parameters
        kinds = {parameter.kind for parameter in taken.values()}
        for place, (argument, parameter) in enumerate(given.items()):
            if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
                assert parameter.kind in kinds, f"{name}(*{argument})"
            else:
                assert list(taken)[place] == argument, f"{name}({argument})"
                assert parameter.default == taken[argument].default, f"{name}({argument}=)"
