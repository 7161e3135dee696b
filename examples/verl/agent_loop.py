"""verl's own agent loop over a pool, on any machine: no GPU, no training. docs/verl.md explains it.

It composes verl's configuration with `rollout.name=rolloutmq`, and starts verl's servers in Ray. Then it publishes two
steps, one through verl's checkpoint engine and one through its server adapter, each with weights of its own. After each
it compares the outputs of verl's agent loop with those over the same weights in this process, by greedy sampling.

.venv/bin/rolloutmq redis
.venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
python examples/verl/agent_loop.py        # in verl's environment, with rolloutmq installed there
"""

import asyncio
import os

import numpy as np
import ray
import torch
from hydra import compose, initialize_config_module
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import TokenOutput

MODEL = os.environ.get("MODEL", "out/tiny")
PROMPTS = int(os.environ.get("PROMPTS", "6"))
OVERRIDES = [
    "actor_rollout_ref.rollout.name=rolloutmq",  # the only change in a verl configuration whose trainer shares GPUs
    f"actor_rollout_ref.model.path={MODEL}",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.temperature=0",
    "data.max_prompt_length=64",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
]


def model_at(path: str, step: int) -> torch.nn.Module:
    """The model with weights of its own for each step."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(step)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return model


class Trainer(Worker):
    """Stands for verl's actor worker, which needs a GPU: it has a checkpoint engine and weights, and does not train."""

    def __init__(self, config) -> None:
        super().__init__()
        parts = config.actor_rollout_ref
        self.path = parts.model.path
        self.engine = CheckpointEngineRegistry.new("rolloutmq", bucket_size=1 << 20, is_master=self.rank == 0)
        self.adapter = get_rollout_class("rolloutmq")(parts.rollout, parts.model, device_mesh=None)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        weights = iter(model_at(self.path, global_steps).state_dict().items())
        if mode == "naive":  # the trainer shares its GPUs with the replicas: verl's default
            return await self.adapter.update_weights(weights, global_steps=global_steps)
        return await self.engine.send_weights(weights, global_steps=global_steps)


class Plain:
    """A model in this process, greedily: what verl's agent loops call, without a server."""

    def __init__(self, model: torch.nn.Module, longest: int = 24) -> None:
        self.model, self.longest = model.eval(), longest

    @torch.inference_mode()
    async def generate(self, request_id, *, prompt_ids, sampling_params, **_) -> TokenOutput:
        ids, logprobs, end = list(prompt_ids), [], self.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        for _step in range(self.longest):
            row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row[ids[-1]]))
            if ids[-1] in ends:
                break
        why = "stop" if ids[-1] in ends else "length"
        return TokenOutput(token_ids=ids[len(prompt_ids) :], log_probs=logprobs, stop_reason=why)


def batch(step: int) -> DataProto:
    prompts = [[{"role": "user", "content": f"Tell me story {number}."}] for number in range(PROMPTS)]
    rows = np.empty(PROMPTS, dtype=object)
    rows[:] = prompts
    return DataProto(
        non_tensor_batch={"raw_prompt": rows, "index": np.arange(PROMPTS)}, meta_info={"global_steps": step}
    )


def configuration(*more: str):
    """verl's own, with these overrides behind the ones above."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", [*OVERRIDES, *more])


def start_trainers(config) -> RayWorkerGroup:
    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Trainer), config), use_gpu=False)


def publish(config, trainers: RayWorkerGroup, manager: LLMServerManager, step: int, backend: str) -> None:
    config.actor_rollout_ref.rollout.checkpoint_engine.backend = backend
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    CheckpointEngineManager(engine, trainers, manager.get_replicas()).update_weights(global_steps=step)


def outputs(config, client, rows: DataProto) -> DataProto:
    """Of verl's agent loop. client: verl's own, or a `Plain`."""
    return asyncio.run(AgentLoopWorker(config, client).generate_sequences(rows))


def compare(pooled: DataProto, plain: DataProto, step: int) -> None:
    for name in sorted({*pooled.batch.keys(), *plain.batch.keys()}):
        ours, theirs = pooled.batch[name], plain.batch[name]
        gap = (ours.double() - theirs.double()).abs().max().item()
        print(f"  {name:20} {tuple(ours.shape)!s:10} largest difference {gap:.1e}")
        assert ours.shape == theirs.shape
        assert gap <= (1e-4 if ours.is_floating_point() else 0), name
    for name in ("global_steps", "min_global_steps", "max_global_steps"):
        assert set(pooled.non_tensor_batch[name].tolist()) == {step}, name


def main() -> None:
    config = configuration()
    ray.init(num_cpus=2, include_dashboard=False)
    manager = LLMServerManager.create(config)
    print("servers:", manager.get_addresses())
    trainers = start_trainers(config)
    for step, backend in ((7, "rolloutmq"), (8, "naive")):
        publish(config, trainers, manager, step, backend)
        print(f"step {step}, published with backend {backend}")
        plain = outputs(config, Plain(model_at(MODEL, step)), batch(step))
        compare(outputs(config, manager.get_client(), batch(step)), plain, step)
    ray.shutdown()


if __name__ == "__main__":
    main()
