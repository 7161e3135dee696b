"""The quick starts of SkyRL's and VERL's guides on a pool: GRPO on word problems, with a tool that scores the answer.

    .venv/bin/rolloutmq redis
    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
    .venv/bin/python examples/gsm8k/train.py

An episode is a conversation: the model calls the tool of tools.yaml, reads what that says, and ends with "#### answer".
The tiny model is random and knows no words: a grammar leaves it the digit and whether to call, and the answers are 1 to
3, of which 3 is the most frequent. A model that can talk (MODEL) needs none: set GRAMMAR to nothing.
"""

import os
from itertools import islice
from pathlib import Path

import torch
from problems import TOOL, problems
from reward_tools import last_number
from rolloutmq import BlockingRolloutClient, EpisodeLimits, RolloutBatch, SamplingParams, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.data import ToolRegistry
from rolloutmq.producer.episodes import ToolEnvironment

STEPS, TASKS, SAMPLES = int(os.environ.get("STEPS", "60")), 4, 8
CALL = rf'<tool_call>\n\{{"name": "{TOOL}", "arguments": \{{"answer": "[0-9]"\}}\}}\n</tool_call>'
GRAMMAR = os.environ.get("GRAMMAR", rf"(#### [0-9]|{CALL})")
registry = ToolRegistry.load(Path(__file__).with_name("tools.yaml"))


def environment(row):
    """An episode's world. Its reward: 1.0 if the last answer is right, and the penalty of each wrong submission."""
    truth = last_number(row["reward_model"]["ground_truth"])

    def score(answer):
        return float("####" in answer.text and last_number(answer.text.rpartition("####")[2]) == truth)

    return ToolEnvironment(row["prompt"], registry, score, tools_kwargs=row["extra_info"]["tools_kwargs"])


def advantages_of(batch):
    """(b,) GRPO: the reward, less the mean of its group, divided by the group's standard deviation."""
    groups = [batch.rewards[batch.groups == group] for group in batch.groups]
    return torch.stack([(own - it.mean()) / (it.std() + 1e-6) for own, it in zip(batch.rewards, groups)])


def loss_of(model, batch, advantages):
    """The tokens' ratios to the probabilities with which they were sampled, cut off at 2, times their advantages."""
    logits = model(batch.ids, attention_mask=batch.attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    ratios = torch.exp(logprobs - batch.logprobs[:, 1:]).clamp(max=2.0)
    return -(advantages[:, None] * ratios * batch.mask[:, 1:]).sum() / batch.mask.sum()


model = load_tiny_model(os.environ.get("MODEL", "out/tiny"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows, curve = problems(STEPS * TASKS, most=3 if GRAMMAR else 500), []
sampling = SamplingParams(max_new_tokens=128 if GRAMMAR else 1024, regex=GRAMMAR or None)
with BlockingRolloutClient() as client, WeightPublisher() as publisher:
    start = publisher.last_version + 1
    publisher.publish(start, model.named_parameters()).wait()
    for version in range(start, start + STEPS):
        episodes = client.episodes(
            islice(rows, TASKS), environment, n=SAMPLES, limits=EpisodeLimits(turns=3, step_s=60.0),
            tools=registry.tools, tool_parser="json", sampling=sampling, min_version=version,
        )  # fmt: skip
        played = list(episodes)
        batch = RolloutBatch.of(row for episode in played for row in episode.rows())
        advantages = advantages_of(batch)
        loss_of(model, batch, advantages).backward()
        optimizer.step(), optimizer.zero_grad()
        publisher.publish(version + 1, model.named_parameters()).wait()
        curve.append(float(batch.rewards.mean()))
        right = sum(episode.stop == "done" and episode.turns[-1].reward > 0 for episode in played)
        print(f"version {version}: {right} of {len(played)} right, {sum(len(it.turns) for it in played)} turns")

for step, value in list(enumerate(curve, 1))[:: max(1, STEPS // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * max(0.0, value))}")
print(f"last steps: reward {sum(curve[-5:]) / len(curve[-5:]):.2f}")
