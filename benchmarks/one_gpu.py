"""A GPU that a trainer shares with a worker: `python -m benchmarks one-gpu --device cuda` (docs/recipes.md).

TRL's GRPOTrainer over a pool whose worker sleeps while it trains, beside the same trainer with its own generation
(transformers' generate): same model, prompts, seeds and reward, each in a process of its own, one after the other. The
worker serves before the trainer starts, so its start is in no figure. The first step, which compiles, is told apart.
The reward is the share of tokens whose id is a multiple of four. Nothing sleeps on a CPU.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolloutmq import BlockingRolloutClient
from rolloutmq.messages.model import MEMORY_TAGS
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

from .harness import Run, names, option, turns
from .parts import Part
from .workers import working

WAYS = ("pool", "own")
HANDED = {"to_trainer_ms": ("sleep_s",), "to_engine_ms": ("wake_weights_s", "wake_s")}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. The defaults are a model of 310 million parameters."""

    device: str = option("cpu", "cpu or cuda.")
    width: int = option(1024, "Of the model, a multiple of 8.", min=8)
    layers: int = option(20, "Of the model.", min=1)
    steps: int = option(40, "Of each run.", min=3)
    prompts: int = option(8, "Of a step.", min=1)
    samples: int = option(8, "Of a prompt.", min=2)
    tokens: int = option(256, "Of a completion, at most.", min=1)
    lr: float = option(1e-4, "Learning rate.")
    asleep: str = option("kv_cache,cuda_graph", f"What the worker gives up: some of {','.join(MEMORY_TAGS)}, or none.")
    memory_saver: str = option("on", "on, or backup: what sleeps is kept in host memory.")
    mem_fraction: float = option(0.4, "The engine's share of the GPU's memory.")
    rounds: int = option(1, "Runs of each way.", min=1)
    sglang: list[str] = option([], "NAME=JSON for the worker; repeatable.")


def train(given: dict[str, Any], model: str, url: str, asleep: list[str]) -> None:
    """One run, in a process of its own; prints what it measured. url: of the pool, "" for TRL's own generation."""
    from rolloutmq.worker import prepare_transformers

    prepare_transformers()
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rolloutmq.producer.trl import PoolRollouts

    plan, ended = Plan(**given), list[float]()
    gpu = plan.device == "cuda"

    class Clock(TrainerCallback):  # type: ignore[misc]  # transformers has no types
        def on_step_end(self, *_given: Any, **_more: Any) -> None:
            if gpu:
                torch.cuda.synchronize()
            ended.append(time.monotonic())

    def reward(completion_ids: list[list[int]], **_columns: Any) -> list[float]:
        return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]

    args = GRPOConfig(
        str(Path(model).parent / "out"), max_steps=plan.steps, num_generations=plan.samples, learning_rate=plan.lr,
        per_device_train_batch_size=plan.prompts * plan.samples, max_completion_length=plan.tokens, bf16=gpu,
        use_cpu=not gpu, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
    )  # fmt: skip
    asked = [{"prompt": [{"role": "user", "content": f"Story {number}"}]} for number in range(256)]
    rollouts = PoolRollouts(url, colocated=asleep) if url else None  # type: ignore[arg-type]  # the plan's words
    trainer = GRPOTrainer(model, reward, args, Dataset.from_list(asked), rollout_func=rollouts, callbacks=[Clock()])
    began = time.monotonic()
    trainer.train()
    if rollouts is not None:
        rollouts.close()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    print("\n" + json.dumps(told([began, *ended], logs)))


def told(ended: list[float], logs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one run, by when each step ended and what TRL logged of it."""
    steps = [after - before for before, after in itertools.pairwise(ended)]
    rewards = [log["reward"] for log in logs]
    ratios = [log[name] for log in logs if (name := "sampling/importance_sampling_ratio/mean") in log]
    found: dict[str, Any] = {
        "first_step_s": round(steps[0], 2),
        "later_steps_s": round(sum(steps[1:]), 2),
        "step_s": round(statistics.median(steps[1:]), 3),
        "tokens": round(statistics.mean(log["completions/mean_length"] for log in logs), 1),
        "reward_first": round(rewards[0], 3),
        "reward_last": round(statistics.mean(rewards[-5:]), 3),
        "importance_ratio": round(statistics.mean(ratios), 4) if ratios else None,
    }
    for name, parts in HANDED.items():
        took = [sum(log[f"rollout/{part}"] for part in parts) for log in logs[1:] if f"rollout/{parts[0]}" in log]
        found[name] = round(1000 * statistics.median(took), 1) if took else None
    return found


def one(way: str, plan: Plan, model: Path) -> dict[str, Any]:
    gpu = plan.device == "cuda"
    asleep = names("--asleep", plan.asleep, MEMORY_TAGS, none=True) if gpu else []
    if way == "own":
        with Part(train, asdict(plan), str(model), "", []) as part:
            return dict(part.answer())
    options = [f"--dtype={'bfloat16' if gpu else 'float32'}", f"--max-running={plan.prompts * plan.samples}"]
    options += [f"--mem-fraction={plan.mem_fraction}", f"--memory-saver={plan.memory_saver}"] if gpu else []
    options += [f"--sglang={setting}" for setting in plan.sglang]
    with (
        EmbeddedRedis() as redis,  # its own: a worker would wait for the version of the trainer before, which has ended
        working(model, url := redis.url, model.parent / "worker.log", *options) as worker,
        BlockingRolloutClient(url) as client,
    ):
        worker.until_serving(client)
        with Part(train, asdict(plan), str(model), url, asleep) as part:
            return dict(part.answer())


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """TRL's GRPOTrainer over a pool whose worker sleeps while it trains, beside the same with its own generation."""
    names("--asleep", plan.asleep, MEMORY_TAGS, none=True)
    rows: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"plan": asdict(plan), "rows": rows}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch, "model")
        dtype = "bfloat16" if plan.device == "cuda" else "float32"
        write_tiny_model(model, layers=plan.layers, width=plan.width, context=plan.tokens + 256, dtype=dtype, tied=True)
        for _, ways in turns(WAYS, plan.rounds):
            for way in ways:
                rows.append({"way": way} | one(way, plan, model))
                run.say(**rows[-1])
                run.keep(figures)
    steps = {way: statistics.median(row["step_s"] for row in rows if row["way"] == way) for way in WAYS}
    return figures | {"speedup": round(steps["own"] / steps["pool"], 2)}
