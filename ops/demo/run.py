"""The demo from end to end: `run_demo`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from ...messages.errors import ConfigError, EngineError, RolloutMQError
from ...producer.blocking import BlockingRolloutClient
from ...sync.publish import WeightPublisher
from ..redis import EmbeddedRedis
from .incidents import Incidents
from .learner import Learner
from .lines import LINE_EVERY, line
from .model import make_model, save_checkpoint, warm_up
from .pool import PoolSettings, Workers
from .report import draw_report
from .summary import objections, summarise
from .trainer import Step, Trainer
from .watch import Watch

STEPS = 130
GOAL = 0.9
WORKERS = 2
POOL = "demo"
START_TIMEOUT_S = 180.0
LATE_S = 60.0
"""Training waits so many seconds beyond its last planned step for a late worker that is not up yet."""


def run_demo(
    out: Path = Path("out/demo"),
    *,
    steps: int | None = None,
    seed: int = 0,
    gpus: bool = False,
    as_json: bool = False,
) -> int:
    """Learn to sort four digits from what a pool of real workers generates; the exit code.

    Writes model/, worker logs, summary.json and report.png into `out`, whose old content of these names is replaced.
    Returns 0, or 1 after saying in plain words what went wrong. WORKERS are up when training begins; one
    of them is killed after a third of the steps, another one joins later. gpus: train on the first GPU and serve on
    all, the other ones first; weights go over NCCL, or by CUDA IPC to a worker on the trainer's GPU. as_json: what
    summary.json has is the one line on stdout, all else goes to stderr.
    """
    logging.getLogger("rolloutmq").setLevel(logging.ERROR)  # a killed worker is part of the programme
    console = Console(file=sys.stderr if as_json else sys.stdout)
    try:
        summary = Demo(out, steps or STEPS, seed, console, visible_gpus() if gpus else ()).run()
    except RolloutMQError as error:
        console.print(f"[red]The demo failed.[/] {type(error).__name__}: {error}", highlight=False, soft_wrap=True)
        return 1
    if as_json:
        print(json.dumps(summary))
    wrong = objections(summary)
    if steps is None and summary["reward_last"] < GOAL:
        wrong.append(f"the reward came to {summary['reward_last']:.2f} only; {GOAL} was to be reached")
    for objection in wrong:
        console.print(f"[red]Wrong:[/] {objection}", highlight=False, soft_wrap=True)
    return 1 if wrong else 0


def visible_gpus() -> tuple[str, ...]:
    """The GPUs by their names in CUDA_VISIBLE_DEVICES. Raises ConfigError if there are fewer than two."""
    count = torch.cuda.device_count()
    if count < 2:
        raise ConfigError(f"--on-gpus: takes two GPUs, one to train and one to serve; this host has {count}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return tuple(named.split(",")) if named else tuple(str(number) for number in range(count))


class Demo:
    """One run; see `run_demo`."""

    def __init__(self, out: Path, steps: int, seed: int, console: Console, gpus: Sequence[str] = ()) -> None:
        self.out, self.steps, self.seed, self.console = out, steps, seed, console
        self.gpus = tuple(gpus)
        self._began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """The summary, which is also on disk. Raises RolloutMQError if the run could not be brought to an end."""
        torch.set_num_threads(1)  # the engines need the other cores
        self.out.mkdir(parents=True, exist_ok=True)
        model, warmup = self._make_model()
        with (
            EmbeddedRedis() as redis,
            Watch(redis.url, POOL) as watch,
            Workers(PoolSettings(redis.url, POOL, self.out / "model", self.out, gpus=self.gpus)) as workers,
        ):
            self._say(f"Redis is up; to watch the pool: rolloutmq top --redis {redis.url} --pool {POOL}")
            self._start(workers, watch)
            with BlockingRolloutClient(redis.url, POOL) as client, WeightPublisher(redis.url, POOL) as publisher:
                learner = Learner(model.to("cuda:0") if self.gpus else model, self.steps)
                trainer = Trainer(client, publisher, learner, np.random.default_rng([self.seed, 1]))
                third = max(1, self.steps // 3)
                incidents = Incidents(workers, watch, trainer.tally, third, third + max(1, self.steps // 10))
                setup = time.monotonic() - self._began
                self._train(trainer, incidents)
            left = workers.drain()
            if bad := {name: code for name, code in left.items() if code != 0}:
                raise EngineError(
                    f"workers did not leave in good order (exit codes {bad}); see their logs in {self.out}"
                )
            watch.close()
            summary = summarise(
                trainer.steps,
                trainer.tally,
                [handle.wait(0) for handle in trainer.published],
                warmup,
                seconds_setup=setup,
                seconds_training=trainer.seconds,
                worker_killed=incidents.victim_reaped,
                worker_joined_late=incidents.newcomer_delivered,
            )
            self._write(summary, trainer, incidents)
        return summary

    def _say(self, text: str) -> None:
        self.console.print(
            f"[{time.monotonic() - self._began:5.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def _make_model(self) -> tuple[Any, dict[str, float]]:
        self._say(
            "making a tiny Qwen2-style model and its tokenizer; a short supervised warm-up stands for a base model"
        )
        model = make_model(self.seed)
        warmup = warm_up(model, np.random.default_rng([self.seed, 0]))
        self._say("warm-up: {steps} supervised steps, {seconds:.1f} s, reward {reward:.2f}".format_map(warmup))
        shutil.rmtree(self.out / "model", ignore_errors=True)
        save_checkpoint(model, self.out / "model")
        return model, warmup

    def _start(self, workers: Workers, watch: Watch) -> None:
        pids = {workers.start().pid for _ in range(WORKERS)}
        self._say(f"{WORKERS} workers load SGLang, logs in {self.out}/worker-*.log")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not watch.wait_serving(pids, 1.0):
            workers.check()
            if time.monotonic() > deadline:
                tails = "\n".join(f"{worker.log}:\n{worker.last_words()}" for worker in workers.all.values())
                raise EngineError(f"not every worker came up within {START_TIMEOUT_S:g} s\n{tails}")
        self._say("all workers serve; from here on it is RL only, on samples that the pool generates")

    def _train(self, trainer: Trainer, incidents: Incidents) -> None:
        planned_end = 0.0

        def goes_on(done: int) -> bool:
            nonlocal planned_end
            if done < self.steps:
                return True
            planned_end = planned_end or time.monotonic()
            return not incidents.complete and time.monotonic() - planned_end < LATE_S

        def on_step(step: Step) -> None:
            incidents.after(step.number)
            incidents.workers.check()
            if step.number % LINE_EVERY == 0 or step.number == 1:
                told = line(trainer.steps, self.steps, incidents.workers, incidents.watch)
                self.console.print(told, markup=False, highlight=False, soft_wrap=True)

        trainer.run(goes_on, on_step)

    def _write(self, summary: dict[str, Any], trainer: Trainer, incidents: Incidents) -> None:
        (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        title = (
            f"RolloutMQ demo: {summary['samples']} samples, {summary['versions_published']} versions, "
            f"{summary['lost']} lost, {summary['duplicates']} duplicates"
        )
        draw_report(
            self.out / "report.png", trainer.steps, incidents.watch, incidents, began=trainer.began, title=title
        )
        self._say(f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f} in {summary['steps']} steps, "
                  f"{summary['seconds_training']:.0f} s")  # fmt: skip
        self._say(f"wrote {self.out}/summary.json and {self.out}/report.png")
