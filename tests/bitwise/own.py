"""The loop of docs/trainers.md, reproducible, with a record of each step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from rolloutmq import (
    BlockingRolloutClient,
    GenerateJob,
    GroupRules,
    PublishHandle,
    SamplingParams,
    Staleness,
    WeightPublisher,
)
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.training import rewards_differ, rows_of
from rolloutmq.producer.training.batch import RolloutBatch
from rolloutmq.producer.training.ratios import importance_ratios, truncated

from .record import DEVICE, ENGINE_DTYPE, GPU, Record, deterministic

ETA, PROMPTS, SAMPLES, TOKENS = 2, 6, 4, 48
CHECKPOINTS = 10 if GPU else 3
"""Steps from one to the next. Those of a model on a GPU take seconds."""


def score(results: Any) -> list[float]:
    return [float((result.token_ids % 4 == 0).mean()) for result in results]


def data() -> Iterator[GenerateJob]:
    """Lengths differ, as answers' do."""
    for i in count():
        most = TOKENS // 4 + i * 7 % TOKENS
        sampling = SamplingParams(max_new_tokens=most)
        yield GenerateJob(token_ids=[10 + i % 200, 20, 30], n=SAMPLES, sampling=sampling)


def logprobs_of(model: Any, batch: RolloutBatch) -> torch.Tensor:
    logits = model(batch.ids, attention_mask=batch.attention).logits[:, :-1]
    found = torch.log_softmax(logits, -1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def take_step(model: Any, optimizer: Any, batch: RolloutBatch, advantages: torch.Tensor) -> tuple[float, float]:
    """A step of truncated importance sampling; returns its loss and the norm of its gradient. advantages: (rows,)."""
    now = logprobs_of(model, batch)
    weights = truncated(importance_ratios(now.detach(), batch.logprobs, batch.mask), 2.0)
    loss = -(advantages[:, None] * weights * now).sum() / batch.mask.sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def save(path: Path, new: Any) -> None:
    torch.save(new, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main(url: str, model_path: str, folder: str, steps: int, free: bool = False) -> None:
    """free: without reproducible=True, to compare the speed."""
    deterministic()
    record, checkpoint = Record(Path(folder)), Path(folder) / "checkpoint.pt"
    model = load_tiny_model(model_path).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5 if GPU else 3e-4)
    rules = GroupRules(score=score, teaches=rewards_differ)
    with (
        BlockingRolloutClient(url, client_id="run", journal=Path(folder) / "journal") as client,
        WeightPublisher(url, dtype=ENGINE_DTYPE) as publisher,
    ):
        feed = client.feed(Staleness(ETA, PROMPTS * SAMPLES, on_stale="wait"), rules, reproducible=not free)
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["random"])
            feed.load_state_dict(saved["feed"])
        version = max(1, feed.books.version)
        feed.renumber(version)

        def publish() -> PublishHandle:
            after = None if free else feed.sampled(version)
            return publisher.publish(version, model.named_parameters(), after=after)

        def keep() -> None:
            state = feed.state_dict()
            random = torch.get_rng_state()
            new = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "feed": state, "random": random}
            save(checkpoint, new)
            feed.saved(state)

        handle = publish()
        keep()  # before the first step: what a step has trained stays in Redis until a checkpoint knows it
        for groups in feed.batches(islice(data(), feed.books.numbers, None), timeout=300):
            batch = RolloutBatch.of(rows_of(groups)).to(DEVICE)
            rewards = [torch.tensor(group.rewards, device=DEVICE) for group in groups]
            advantages = torch.cat([(it - it.mean()) / (it.std(correction=0) + 1e-3) for it in rewards])
            loss, norm = take_step(model, optimizer, batch, advantages)
            feed.train(groups)
            version += 1
            before, handle = handle, publish()
            feed.advance(version)
            step = feed.books.updates - 1
            if (step + 1) % CHECKPOINTS == 0:
                before.wait(for_="committed")  # of all versions a checkpoint has one: the pool has those before
                keep()
            record.step(step, [result for group in groups for result in group.results], loss, norm)
            if step == steps - 1:
                break
        record.end(model)
        client.cancel_all()
