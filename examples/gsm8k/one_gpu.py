"""One GPU for trainer and worker: TRL's GRPOTrainer on word problems. docs/recipes.md explains it.

    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq up --model out/tiny --dtype float32
    .venv/bin/python examples/gsm8k/one_gpu.py

The tiny model is random: it is first taught to say "#### " and any digit, so that there is something to reward. The
answers are 1 to 3. A model that can talk (MODEL) needs neither: set TAUGHT to 0.
"""

import os
import random
from contextlib import closing

import torch
from problems import problems
from reward_tools import last_number
from rolloutmq.worker import prepare_transformers

prepare_transformers()  # only needed beside a CPU build of torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL, GPU = os.environ.get("MODEL", "out/tiny"), torch.cuda.is_available()
STEPS, TAUGHT = int(os.environ.get("STEPS", "60")), int(os.environ.get("TAUGHT", "60"))
MOST = 3 if TAUGHT else 500
TOLD = [] if TAUGHT else [{"role": "system", "content": "Solve the problem step by step. Then say #### <answer>."}]


def tasks(count):
    """(conversation, right answer) pairs."""
    return [(TOLD + row["prompt"][1:], row["reward_model"]["ground_truth"]) for row in problems(count, most=MOST)]


def right(text, truth):
    """1.0 if what follows the last #### is the right number, else 0.0."""
    return float("####" in text and last_number(text.rpartition("####")[2]) == last_number(truth))


def taught(model, tokenizer, steps):
    """The model, once it says "#### " and a digit, whatever it is asked."""
    draw, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), lr=3e-3)
    asked = [tokenizer.apply_chat_template(task, add_generation_prompt=True, tokenize=False) for task, _ in tasks(64)]
    for _ in range(steps):
        texts = [f"{text}#### {draw.randint(1, 9)}{tokenizer.eos_token}" for text in draw.sample(asked, 8)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        logits = model(**batch).logits[:, -8:-1]  # the last seven tokens are the answer
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["input_ids"][:, -7:].flatten()).backward()
        optimizer.step(), optimizer.zero_grad()
    return model


def load():
    """Model and tokenizer as training begins with them."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return taught(model.to("cuda" if GPU else "cpu"), tokenizer, TAUGHT), tokenizer


def draw_curve(rewards):
    for step, value in list(enumerate(rewards, 1))[:: max(1, len(rewards) // 20)]:
        print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
    print(f"last steps: reward {sum(rewards[-5:]) / len(rewards[-5:]):.2f}")


def reward(completions, truth, **_):
    return [right(completion[0]["content"], its) for completion, its in zip(completions, truth)]


if __name__ == "__main__":
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from rolloutmq.producer.trl import PoolRollouts

    args = GRPOConfig(
        "out/one_gpu", max_steps=STEPS, per_device_train_batch_size=64, num_generations=8,
        max_completion_length=16 if TAUGHT else 512, learning_rate=5e-4 if TAUGHT else 1e-6,
        vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0,
        logging_steps=1, save_strategy="no", report_to=[], bf16=GPU, use_cpu=not GPU, disable_tqdm=True,
    )  # fmt: skip
    model, tokenizer = load()
    dataset = Dataset.from_list([{"prompt": task, "truth": truth} for task, truth in tasks(1024)])
    with closing(PoolRollouts(colocated=["kv_cache", "cuda_graph"] if GPU else [])) as rollouts:
        trainer = GRPOTrainer(model, reward, args, dataset, processing_class=tokenizer, rollout_func=rollouts)
        trainer.remove_callback(PrinterCallback)  # the curve is printed at the end
        trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    draw_curve([log["reward"] for log in logs])
    ratios = [log["sampling/importance_sampling_ratio/mean"] for log in logs]
    print(f"importance ratio {sum(ratios) / len(ratios):.3f}")
    for name in ("sleep_s", "wake_weights_s", "wake_s"):
        if took := [log[f"rollout/{name}"] for log in logs if f"rollout/{name}" in log]:
            print(f"{name} {sum(took) / len(took):.3f}")
