"""A LoRA adapter, trained by TRL's GRPOTrainer over a pool.

    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq up --model out/tiny --dtype float32
    .venv/bin/python examples/lora.py

On a GPU the adapter travels alone: a few megabytes for each step, beside a base model that the workers keep. Start them
with `--max-lora-rank 16` there. SGLang runs no adapters on a CPU, so there it is merged into the weights for the copy.

TRL trains no adapter of the head. The tiny model's is random and small: whatever comes out of the layers before it, the
reward is at most 0.32. At a temperature of 0.2 that limit is 1.00. A trained model needs no such help.
"""

import os
import sys
from pathlib import Path

if not Path("out/tiny").exists():
    sys.exit("out/tiny has no model: start the commands at the top of this file")
import torch
from rolloutmq.worker import prepare_transformers

prepare_transformers()  # only needed beside a CPU build of torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from rolloutmq.producer.trl import PoolRollouts

STEPS, GPU = int(os.environ.get("STEPS", "40")), torch.cuda.is_available()
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Story {i}"}]} for i in range(256)])


def reward(completion_ids, **_):
    """The share of tokens whose id is a multiple of four."""
    return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]


args = GRPOConfig(
    "out/lora", max_steps=STEPS, per_device_train_batch_size=64, num_generations=8, max_completion_length=16,
    vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0, learning_rate=1e-3,
    temperature=0.2, logging_steps=1, save_strategy="no", report_to=[], bf16=False, use_cpu=not GPU, disable_tqdm=True,
)  # fmt: skip
modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
rollouts = PoolRollouts(adapter="policy" if GPU else None)
trainer = GRPOTrainer(
    "out/tiny", reward, args, dataset, rollout_func=rollouts,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=modules, task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.remove_callback(PrinterCallback)  # the curve is printed at the end
trainer.train()
rollouts.close()

rewards = [(log["step"], log["reward"]) for log in trainer.state.log_history if "reward" in log]
for step, value in rewards[:: max(1, len(rewards) // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
print(f"last steps: reward {sum(value for _, value in rewards[-5:]) / len(rewards[-5:]):.2f}")
