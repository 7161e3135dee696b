"""TRL's GRPOTrainer over a pool: one argument in place of vLLM. docs/trainers.md explains it.

.venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq up --model out/tiny --dtype float32
.venv/bin/python examples/trl_grpo.py
"""

import os
import sys
from pathlib import Path

if not Path("out/tiny").exists():
    sys.exit("out/tiny has no model: start the commands at the top of this file")
from rolloutmq.worker import prepare_transformers

prepare_transformers()  # only needed beside a CPU build of torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from rolloutmq.producer.trl import PoolRollouts

STEPS = int(os.environ.get("STEPS", "60"))
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Story {i}"}]} for i in range(256)])


def reward(completion_ids, **_):
    """The share of tokens whose id is a multiple of four."""
    return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]


args = GRPOConfig(
    "out/trl_grpo", max_steps=STEPS, per_device_train_batch_size=64, num_generations=8, max_completion_length=16,
    vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0, learning_rate=2e-3,
    logging_steps=1, save_strategy="no", report_to=[], bf16=False, use_cpu=True, disable_tqdm=True,
)  # fmt: skip
rollouts = PoolRollouts()
trainer = GRPOTrainer("out/tiny", reward, args, dataset, rollout_func=rollouts)
trainer.remove_callback(PrinterCallback)  # the curve is printed at the end
trainer.train()
rollouts.close()

rewards = [(log["step"], log["reward"]) for log in trainer.state.log_history if "reward" in log]
for step, value in rewards[:: max(1, len(rewards) // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
print(f"last steps: reward {sum(value for _, value in rewards[-5:]) / len(rewards[-5:]):.2f}")
