"""An asynchronous training loop of one's own, in plain torch: it trains while the pool generates the next batches.

    .venv/bin/rolloutmq redis
    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq worker --model out/tiny --dtype float32
    .venv/bin/python examples/async_loop.py

Each step trains on the groups that are complete first, whatever versions sampled them. Truncated importance sampling
(Ionides 2008; IMPALA, arXiv:1802.01561) corrects for that: a token counts by the ratio of its probabilities now and
then, at most TRUNCATE.
"""

import itertools
import os

import torch
from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model

STEPS = int(os.environ.get("STEPS", "60"))
PROMPTS, SAMPLES, AHEAD, TRUNCATE = 8, 8, 2, 2.0  # AHEAD: batches under way beside the one that is trained on
model = load_tiny_model("out/tiny")  # your own: AutoModelForCausalLM.from_pretrained
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
sampling = SamplingParams(max_new_tokens=16)
prompts = ([10 + i % 200, 20, 30] for i in itertools.count())


def reward(result):
    """The share of tokens whose id is a multiple of four."""
    return float((result.token_ids % 4 == 0).mean())


def logprobs(result):
    """(t,) float32: of the sample's tokens, under the weights as they are now."""
    ids = torch.tensor([*result.prompt_ids, *result.token_ids])
    logits = model(ids[None, :-1]).logits[0, -len(result.token_ids) :]
    return torch.log_softmax(logits, -1).gather(1, ids[-len(result.token_ids) :, None])[:, 0]


curve, ages = [], []
with BlockingRolloutClient() as client, WeightPublisher() as publisher:
    start = publisher.last_version + 1
    publisher.publish(start, model.named_parameters()).wait()
    jobs = (GenerateJob(token_ids=ids, n=SAMPLES, min_version=start, sampling=sampling) for ids in prompts)
    client.submit_many(itertools.islice(jobs, PROMPTS * (1 + AHEAD)))
    groups = client.groups(timeout=300)
    for version in range(start, start + STEPS):
        batch, rewards = [next(groups) for _ in range(PROMPTS)], []
        for group in batch:
            scores = torch.tensor([reward(result) for result in group.results])
            for result, advantage in zip(group.results, scores - scores.mean()):
                now = logprobs(result)
                weight = torch.exp(now.detach() - torch.tensor(result.logprobs)).clamp(max=TRUNCATE)
                (-advantage * (weight * now).mean() / (PROMPTS * SAMPLES) / (scores.std() + 1e-3)).backward()
                ages.append(version - result.versions[0])
            rewards.append(float(scores.mean()))
        optimizer.step(), optimizer.zero_grad()
        publisher.publish(version + 1, model.named_parameters())  # returns at once
        client.submit_many(itertools.islice(jobs, PROMPTS))
        curve.append(sum(rewards) / len(rewards))
    client.cancel_all()

for step, value in list(enumerate(curve, 1))[:: max(1, STEPS // 20)]:
    print(f"step {step:4d}  reward {value:.2f}  {'#' * round(50 * value)}")
print(f"last steps: reward {sum(curve[-5:]) / len(curve[-5:]):.2f}, staleness {sum(ages) / len(ages):.1f} on average")
