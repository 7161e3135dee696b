"""Episodes that call a tool which never says the same twice: a repeat takes what it said from the first run's journal.

Batches are asynchronous by schedule: the episodes of batch k are sampled by version max(1, k + 1 - ETA).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolloutmq import PublishHandle, RolloutClient, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.episodes import Episode, EpisodeLimits, Step
from rolloutmq.producer.training import seed_of
from rolloutmq.producer.training.batch import RolloutBatch

from .own import save, take_step
from .record import DEVICE, ENGINE_DTYPE, Record, deterministic

ETA, TASKS, EPISODES, TOKENS, TURNS = 2, 3, 4, 20, 3


class Dice:
    """Shows the model three tokens that a tool has drawn, after each of its answers."""

    def __init__(self, ended: Any, task: int) -> None:
        self._ended, self._task, self._turns = ended, task, 0

    def reset(self) -> list[int]:
        return [10 + self._task % 200, 20, 30]

    def step(self, answer: Any) -> Step:
        reward = float((answer.token_ids % 4 == 0).mean())
        return Step([40 + secrets.randbelow(200) for _ in range(3)], reward)

    def close(self) -> None:
        self._ended(self._task)


class Waves:
    """The episodes of each batch. They begin as soon as their version is to come, and wait for their turn."""

    def __init__(self, client: RolloutClient, repeat: Path | None) -> None:
        self._client, self._repeat = client, repeat
        self._begun: dict[int, tuple[AsyncIterator[Episode], asyncio.Task[Episode]]] = {}
        self._left: dict[int, int] = {}  # episodes of a batch that have not ended
        self._waiting: list[tuple[int, Future[None]]] = []

    def begin(self, batch: int) -> None:
        self._left[batch] = TASKS * EPISODES
        playing = self._client.episodes(
            range(batch * TASKS, (batch + 1) * TASKS),
            partial(Dice, self._ended),
            n=EPISODES,
            limits=EpisodeLimits(turns=TURNS),
            run="run",
            start=batch * TASKS,
            sampling={"max_new_tokens": TOKENS},
            exact_version=version_of(batch),
            seed=seed_of(f"batch {batch}"),
            repeat=self._repeat,
        )
        self._begun[batch] = playing, asyncio.create_task(anext(playing))

    async def take(self, batch: int) -> list[Episode]:
        """All of a batch, in their order."""
        playing, first = self._begun.pop(batch)
        found = [await first, *[episode async for episode in playing]]
        assert all(episode.ok for episode in found), [episode.error for episode in found]
        return sorted(found, key=lambda it: (it.number, it.sample))

    def sampled(self, version: int) -> Future[None]:
        """Done when all batches of older versions have been played."""
        done: Future[None] = Future()
        self._waiting.append((version, done))
        self._look()
        return done

    def _ended(self, task: int) -> None:
        self._left[task // TASKS] -= 1
        if not self._left[task // TASKS]:
            del self._left[task // TASKS]
            self._look()

    def _look(self) -> None:
        for pair in list(self._waiting):
            if all(version_of(batch) >= pair[0] for batch in self._left):
                self._waiting.remove(pair)
                pair[1].set_result(None)


def version_of(batch: int) -> int:
    return max(1, batch + 1 - ETA)


def parts_of(episode: Episode) -> tuple[Any, Any, Any]:
    history = episode.history
    return history.token_ids, history.versions, np.nan_to_num(history.logprobs)


def main(url: str, model_path: str, folder: str, steps: int) -> None:
    asyncio.run(train(url, model_path, Path(folder), steps))


async def train(url: str, model_path: str, folder: Path, steps: int) -> None:
    deterministic()
    record, checkpoint = Record(folder), folder / "checkpoint.pt"
    model = load_tiny_model(model_path).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = 0
    if checkpoint.exists():
        read = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(read["model"])
        optimizer.load_state_dict(read["optimizer"])
        torch.set_rng_state(read["random"])
        step = read["step"]
    first = folder.parent / "undisturbed" / "journal"
    repeat = None if folder.name == "undisturbed" else first
    publisher = await asyncio.to_thread(partial(WeightPublisher, url, dtype=ENGINE_DTYPE))
    # What is taken stays in Redis: the checkpoint may be older.
    client = RolloutClient(url, client_id="run", journal=folder / "journal", before_ack=lambda closing: closing)
    async with client:
        waves = Waves(client, repeat)

        def publish(version: int) -> PublishHandle:
            return publisher.publish(version, model.named_parameters(), after=waves.sampled(version))

        def keep() -> None:
            new = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save(checkpoint, new | {"random": torch.get_rng_state()})

        for batch in range(step, step + ETA):
            waves.begin(batch)
        handle = publish(step + 1)
        keep()
        while step < steps:
            waves.begin(step + ETA)
            episodes = await waves.take(step)
            loss, norm = learn(model, optimizer, episodes)
            record.step(step, map(parts_of, episodes), loss, norm)
            step += 1
            before, handle = handle, publish(step + 1)
            if step % 3 == 0:
                await asyncio.to_thread(before.wait, for_="committed")
                keep()
        record.end(model)
        await client.cancel_all()
    await asyncio.to_thread(publisher.close)


def learn(model: Any, optimizer: Any, episodes: list[Episode]) -> tuple[float, float]:
    rewards = torch.tensor([episode.reward for episode in episodes], device=DEVICE).view(TASKS, EPISODES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-3)).flatten()
    batch = RolloutBatch.of([row for episode in episodes for row in episode.rows()]).to(DEVICE)
    return take_step(model, optimizer, batch, advantages)
