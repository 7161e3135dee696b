"""Whether an update's mode changes what is learned: `python -m benchmarks curves` (benchmarks/README.md).

The task, learner and asynchronous loop of `rolloutmq demo` with two real workers and a new version at every step, once
in each mode with the same seeds. Nothing is killed. `gap` is the mean difference between the log-probabilities of the
engine and of the trainer, which computes them anew with the very version that sampled each token.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from rolloutmq import BlockingRolloutClient, WeightPublisher
from rolloutmq.messages.model import UpdateMode
from rolloutmq.ops.demo.learner import Learner
from rolloutmq.ops.demo.model import make_model, save_checkpoint, warm_up
from rolloutmq.ops.demo.pool import PoolSettings, Workers
from rolloutmq.ops.demo.trainer import Trainer
from rolloutmq.ops.redis import EmbeddedRedis

from .harness import Run, option

WORKERS, POINTS = 2, 10
"""Of a curve: each is the mean reward of as many steps."""


def curve(mode: UpdateMode, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    model = make_model(seed)
    warm_up(model, np.random.default_rng([seed, 0]))
    save_checkpoint(model, folder / "model")
    with EmbeddedRedis() as redis, Workers(PoolSettings(redis.url, "curves", folder / "model", folder)) as workers:
        for _ in range(WORKERS):
            workers.start()
        with (
            BlockingRolloutClient(redis.url, "curves") as client,
            WeightPublisher(redis.url, "curves", mode=mode) as publisher,
        ):
            while sum(worker.state == "serving" for worker in client.workers()) < WORKERS:
                workers.check()
                time.sleep(0.2)
            trainer = Trainer(client, publisher, Learner(model, steps), np.random.default_rng([seed, 1]))
            trainer.run(lambda done: done < steps, lambda step: None)
            states = [handle.wait(60).state for handle in trainer.published]
        workers.drain()
    done = trainer.steps
    stale = [(staleness, count) for step in done for staleness, count in step.stale.items()]
    return {
        "mode": mode,
        "seed": seed,
        "steps": len(done),
        "seconds": round(trainer.seconds, 1),
        "taken": states.count("committed"),
        "staleness": round(sum(age * count for age, count in stale) / sum(count for _, count in stale), 2),
        "gap": round(sum(step.gap_sum for step in done) / sum(step.gap_tokens for step in done), 4),
        "reward": [
            round(statistics.mean(step.reward for step in part), 3)
            for part in (done[at * steps // POINTS : (at + 1) * steps // POINTS] for at in range(POINTS))
        ],
    }


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    steps: int = option(120, "Of each run.", min=POINTS)
    seeds: int = option(3, "Runs of each mode.", min=1)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Whether an update's mode changes what is learned: reward curves of the demo's task in each mode."""
    torch.set_num_threads(1)  # the engines need the other cores
    curves: list[dict[str, Any]] = []
    for seed, mode in itertools.product(range(plan.seeds), get_args(UpdateMode)):
        with tempfile.TemporaryDirectory() as folder:
            curves.append(curve(mode, seed, plan.steps, Path(folder)))
        run.say(**curves[-1])
        run.keep({"curves": curves})
    return {"curves": curves}
