"""A trainer on two GPUs of eight, sharded by FSDP2, beside six workers. docs/recipes.md explains it.

    .venv/bin/rolloutmq tiny-model out/tiny && .venv/bin/rolloutmq up --model out/tiny --dtype float32 --workers 2
    .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/gsm8k/eight_gpus.py

Task and model are those of one_gpu.py, the reward is the Gsm8k tool's. Rank 0 speaks to the pool. All ranks train on
their part of each batch, and take part in each publication, which gathers the shards.
"""

import os
from contextlib import ExitStack
from itertools import cycle

import torch
import torch.distributed as dist
from one_gpu import GPU, STEPS, TAUGHT, draw_curve, load, tasks
from reward_tools import Gsm8kTool
from rolloutmq import BlockingRolloutClient, GenerateJob, GroupRules, SamplingParams, Staleness, WeightPublisher
from rolloutmq.producer.training import rewards_differ, rows_of
from rolloutmq.producer.training.batch import RolloutBatch
from rolloutmq.producer.training.ratios import importance_ratios, truncated
from torch.distributed.fsdp import fully_shard

PROMPTS, SAMPLES = 8, 8
"""Of each step. Groups whose samples all earn the same are dropped, and others take their place."""
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if GPU else torch.device("cpu")
if GPU:
    torch.cuda.set_device(DEVICE)
dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()

model, tokenizer = load()
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if TAUGHT else 1e-6)
tool, sampling = Gsm8kTool({}, None), SamplingParams(max_new_tokens=16 if TAUGHT else 512)


def jobs():
    for task, truth in cycle(tasks(1024)):  # without an end: it takes more groups than are trained on
        ids = tokenizer.apply_chat_template(task, add_generation_prompt=True, return_dict=True)["input_ids"]
        yield GenerateJob(token_ids=ids, n=SAMPLES, sampling=sampling, metadata={"truth": truth})


async def score(results):
    texts = (tokenizer.decode(result.token_ids).partition("####")[2] for result in results)  # "" without it
    return [float(await tool.right(text, result.metadata["truth"])) for text, result in zip(texts, results)]


def to_all(value):
    """Rank 0's value, on every rank."""
    told = [value]
    dist.broadcast_object_list(told, device=torch.device("cpu"))
    return told[0]


def loss_of(batch, advantages):
    """This rank's part of the loss; FSDP takes the mean of all ranks' gradients."""
    ids, attention, mask = (it[RANK::RANKS].to(DEVICE) for it in (batch.ids, batch.attention, batch.mask))
    sampled, advantages = batch.logprobs[RANK::RANKS].to(DEVICE), advantages[RANK::RANKS].to(DEVICE)
    logits = model(ids, attention_mask=attention).logits[:, :-1].float()
    found = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
    now = torch.nn.functional.pad(found, (1, 0))  # of each token, at its own place
    weights = truncated(importance_ratios(now.detach(), sampled, mask), 2.0)  # 0 at given tokens
    return -(advantages[:, None] * weights * now).sum() / batch.mask.sum() * RANKS


with ExitStack() as opened:
    publisher = opened.enter_context(WeightPublisher())
    version = to_all(publisher.last_version + 1)
    publisher.publish(version, model.named_parameters()).wait()
    curve, ages, batches = [], [], iter(())
    if RANK == 0:
        client = opened.enter_context(BlockingRolloutClient())
        rules = GroupRules(score=score, teaches=rewards_differ)
        feed = client.feed(Staleness(eta=1, batch_size=PROMPTS * SAMPLES), rules, version=version)
        batches = feed.batches(jobs(), timeout=600)
    for _ in range(STEPS):
        groups = next(batches) if RANK == 0 else None
        batch, advantages = None, None
        if RANK == 0:
            batch = RolloutBatch.of(rows_of(groups))
            rewards = [torch.tensor(group.rewards) for group in groups]
            advantages = torch.cat([(it - it.mean()) / (it.std(correction=0) + 1e-3) for it in rewards])
            curve.append(float(batch.rewards.mean()))
            ages.append(version - float(batch.versions[batch.mask == 1].double().mean()))
        batch, advantages = to_all((batch, advantages))
        loss_of(batch, advantages).backward()
        optimizer.step(), optimizer.zero_grad()
        version += 1
        publisher.publish(version, model.named_parameters())  # returns at once
        if RANK == 0:
            feed.train(groups)
            feed.advance(version)
if RANK == 0:
    draw_curve(curve)
    print(f"staleness {sum(ages) / len(ages):.2f}, {feed.books.trained} samples trained")
dist.barrier()
os._exit(0)  # gloo's threads, ended by the interpreter's own way out, abort the process now and then
