"""Trains an agent that speaks to an OpenAI endpoint and knows of no training: `agent_openai.py`, as it is.

    .venv/bin/rolloutmq redis
    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
    .venv/bin/rolloutmq gateway --served-model-name tiny
    .venv/bin/python examples/train_through_gateway.py

Each agent has a base URL of its own, which names its session. The trainer takes the session's turns out of the pool,
as the model saw and generated them, and says what they were worth.
"""

import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from openai import OpenAI
from rolloutmq import BlockingRolloutClient, RolloutBatch, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model

sys.path.append(str(Path(__file__).parent))
from agent_openai import is_even

GATEWAY = os.environ.get("GATEWAY", "http://127.0.0.1:8000")
STEPS = int(os.environ.get("STEPS", "50"))
SESSIONS = 64  # of a step
model = load_tiny_model("out/tiny")  # your own: AutoModelForCausalLM.from_pretrained
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
endpoint = OpenAI(base_url=f"{GATEWAY}/v1", api_key="none", max_retries=8)
draw, curve, gaps = random.Random(0), [], []


def play(session, task):
    """Let an agent do its task; returns what that is worth."""
    said = is_even(endpoint.with_options(base_url=f"{GATEWAY}/sessions/{session}/v1"), *task)
    return float(said == (sum(task) % 2 == 0))


def loss_of(batch):
    """Policy gradient: each sampled token counts by how much better than the others its session was."""
    advantages = batch.rewards - batch.rewards.mean()  # over their deviation, a rare failure moves the model far
    logits = model(batch.ids, attention_mask=batch.attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    mask = batch.mask[:, 1:]
    gaps.append(float(((logprobs.detach() - batch.logprobs[:, 1:]) * mask).abs().max()))
    return -(advantages[:, None] * logprobs * mask).sum() / len(batch.rewards)


with BlockingRolloutClient() as client, WeightPublisher() as publisher, ThreadPoolExecutor(SESSIONS) as agents:
    start = publisher.last_version + 1
    publisher.publish(start, model.named_parameters()).wait()
    for version in range(start, start + STEPS):
        tasks = {f"v{version}-{n}": (draw.randrange(10), draw.randrange(10)) for n in range(SESSIONS)}
        rewards = dict(zip(tasks, agents.map(play, tasks, tasks.values())))
        rows = [row for name in tasks for row in client.take_session(name).rows(rewards[name])]
        loss_of(RolloutBatch.of(rows)).backward()
        optimizer.step(), optimizer.zero_grad()
        publisher.publish(version + 1, model.named_parameters()).wait()
        for name in tasks:
            client.forget_session(name)
        curve.append(sum(rewards.values()) / SESSIONS)

for step, value in list(enumerate(curve, 1))[:: max(1, STEPS // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
print(f"last steps: reward {sum(curve[-5:]) / len(curve[-5:]):.2f}")
print(f"log-probabilities are the trainer's own within {max(gaps):.1e}")
