"""verl's own agent loop over a pool, on any machine: no GPU, no training. docs/verl.md explains it.

It composes verl's configuration with `rollout.name=rolloutmq`, starts verl's servers and agent loop workers in Ray,
publishes a version through verl's checkpoint engine, and compares the outputs with those of the same agent loop over
the same model in this process, by greedy sampling.

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
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import TokenOutput

MODEL = os.environ.get("MODEL", "out/tiny")
PROMPTS = int(os.environ.get("PROMPTS", "6"))
OVERRIDES = [
    "actor_rollout_ref.rollout.name=rolloutmq",  # the only change in a verl configuration whose trainer shares GPUs
    "actor_rollout_ref.rollout.checkpoint_engine.backend=rolloutmq",  # and this where it does not
    f"actor_rollout_ref.model.path={MODEL}",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.temperature=0",
    "data.max_prompt_length=64",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.calculate_log_probs=True",
]


class Trainer(Worker):
    """Stands for verl's actor worker, which needs a GPU: it has a checkpoint engine and weights, and does not train."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.engine = CheckpointEngineRegistry.new("rolloutmq", bucket_size=1 << 20, is_master=self.rank == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        return await self.engine.send_weights(iter(self.model.state_dict().items()), global_steps=global_steps)


class Plain:
    """The same model in this process, greedily: what verl's clients call, without a server."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.inference_mode()
    async def generate(self, request_id, *, prompt_ids, sampling_params, **_) -> TokenOutput:
        ids, logprobs, end = list(prompt_ids), [], self.model.generation_config.eos_token_id
        ends = end if isinstance(end, list) else [end]
        for _step in range(24):
            row = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row[ids[-1]]))
            if ids[-1] in ends:
                break
        why = "stop" if ids[-1] in ends else "length"
        return TokenOutput(token_ids=ids[len(prompt_ids) :], log_probs=logprobs, stop_reason=why)


def batch() -> DataProto:
    prompts = [[{"role": "user", "content": f"Tell me story {number}."}] for number in range(PROMPTS)]
    rows = np.empty(PROMPTS, dtype=object)
    rows[:] = prompts
    return DataProto(non_tensor_batch={"raw_prompt": rows, "index": np.arange(PROMPTS)}, meta_info={"global_steps": 7})


def main() -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", OVERRIDES)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    manager = LLMServerManager.create(config)
    print("servers:", manager.get_addresses())

    trainers = RayWorkerGroup(
        RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(Trainer), MODEL),
        use_gpu=False,
    )
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    sync = CheckpointEngineManager(engine, trainers, manager.get_replicas())
    print("published:", sync.update_weights(global_steps=7))

    pooled = asyncio.run(AgentLoopWorker(config, manager.get_client()).generate_sequences(batch()))
    plain = asyncio.run(AgentLoopWorker(config, Plain(MODEL)).generate_sequences(batch()))
    for name in sorted({*pooled.batch.keys(), *plain.batch.keys()}):
        ours, theirs = pooled.batch[name], plain.batch[name]
        gap = (ours.float() - theirs.float()).abs().max().item()
        print(f"{name:24} {tuple(ours.shape)!s:14} largest difference {gap:.1e}")
        assert ours.shape == theirs.shape
        assert gap < (1e-4 if ours.is_floating_point() else 0.5), name
    for name, values in pooled.non_tensor_batch.items():
        print(f"{name:24} {values[0]!r}")
    ray.shutdown()


if __name__ == "__main__":
    main()
