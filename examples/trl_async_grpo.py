"""TRL's AsyncGRPOTrainer over a pool: three lines in place of vLLM. docs/trainers.md explains them.

    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq up --model out/tiny --dtype float32
    .venv/bin/python examples/trl_async_grpo.py

The same command goes on from the last checkpoint, if there is one.
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
from transformers.trainer_utils import get_last_checkpoint
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from rolloutmq.producer.trl import PoolRolloutWorker, PoolWeightTransfer, prepare_cpu

STEPS = int(os.environ.get("STEPS", "120"))
MODEL, OUT = "out/tiny", Path("out/trl_async_grpo")
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Story {i}"}]} for i in range(256)])


def reward(completion_ids, **_):
    """The share of tokens whose id is a multiple of four."""
    return [sum(token % 4 == 0 for token in ids) / len(ids) for ids in completion_ids]


args = AsyncGRPOConfig(
    str(OUT), max_steps=STEPS, per_device_train_batch_size=64, num_generations=8, max_completion_length=16,
    learning_rate=2e-3, max_staleness=4, save_steps=40, save_total_limit=2, report_to=[], bf16=False, disable_tqdm=True,
)  # fmt: skip
prepare_cpu()  # does nothing where there is a GPU
weights = PoolWeightTransfer()
worker = PoolRolloutWorker(weights, MODEL, args, dataset, reward, client_id="trl-async-grpo")
trainer = AsyncGRPOTrainer(
    MODEL, reward, args, dataset, rollout_worker=worker, weight_transfer=weights, callbacks=[worker]
)
trainer.remove_callback(PrinterCallback)  # the curve is printed at the end
trainer.train(resume_from_checkpoint=get_last_checkpoint(OUT) if OUT.exists() else None)

rewards = [(log["step"], log["reward"]) for log in trainer.state.log_history if "reward" in log]
for step, value in rewards[:: max(1, len(rewards) // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
books = worker.books
print(f"last steps: reward {sum(value for _, value in rewards[-5:]) / len(rewards[-5:]):.2f}")
print(f"{books.accepted} = {books.trained} trained + {dict(books.dropped)} dropped + {books.in_flight} in flight")
