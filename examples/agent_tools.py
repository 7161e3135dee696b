"""An agent that learns to use a tool, in plain torch: it has to call the calculator, and to say what that answered.

    .venv/bin/rolloutmq redis
    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
    .venv/bin/python examples/agent_tools.py

The model of this example is tiny and random, so its words are single tokens. An even one calls the tool, and the tool
says "0" or "1". The next one is right if it is even for "0", and odd for "1". Guessing earns 0.25 on average.
"""

import os
import random

import torch
from rolloutmq import BlockingRolloutClient, EpisodeLimits, RolloutBatch, SamplingParams, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.episodes import Calculator, Step

STEPS = int(os.environ.get("STEPS", "60"))
TASKS, SAMPLES = 16, 8


class Parity:
    """One episode: whether a sum is even."""

    def __init__(self, task):
        self.expression, self.answer, self.tool = f"({task[0]} + {task[1]}) % 2", None, Calculator()

    def reset(self):
        return list(self.expression.encode())

    async def step(self, answer):
        odd = int(answer.token_ids[0]) % 2
        if self.answer is not None:
            return Step(None, reward=float(self.answer == str(odd)), done=True)
        if odd:
            return Step(None, reward=0.0, done=True)  # no call, no answer
        self.answer = await self.tool(self.expression)
        return Step(list(f"={self.answer}:".encode()))

    def close(self):
        pass


def loss_of(model, rows):
    """Policy gradient: each sampled token counts by its episode's reward, less the mean of its task's episodes."""
    batch = RolloutBatch.of(rows)
    mean = {group: batch.rewards[batch.groups == group].mean() for group in batch.groups.tolist()}
    advantages = torch.stack([reward - mean[group] for reward, group in zip(batch.rewards, batch.groups.tolist())])
    logits = model(batch.ids, attention_mask=batch.attention).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return -(advantages[:, None] * logprobs * batch.mask[:, 1:]).sum() / len(rows)


model = load_tiny_model("out/tiny")  # your own: AutoModelForCausalLM.from_pretrained
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
draw, curve = random.Random(0), []
with BlockingRolloutClient() as client, WeightPublisher() as publisher:
    start = publisher.last_version + 1
    publisher.publish(start, model.named_parameters()).wait()
    for version in range(start, start + STEPS):
        tasks = [(draw.randrange(10), draw.randrange(10)) for _ in range(TASKS)]
        episodes = client.episodes(
            tasks, Parity, n=SAMPLES, limits=EpisodeLimits(turns=2),
            sampling=SamplingParams(max_new_tokens=1), min_version=version,
        )  # fmt: skip
        played = list(episodes)
        loss_of(model, [row for episode in played for row in episode.rows()]).backward()
        optimizer.step(), optimizer.zero_grad()
        publisher.publish(version + 1, model.named_parameters()).wait()
        curve.append(sum(episode.reward for episode in played) / len(played))

for step, value in list(enumerate(curve, 1))[:: max(1, STEPS // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
print(f"last steps: reward {sum(curve[-5:]) / len(curve[-5:]):.2f}")
