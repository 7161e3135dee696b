"""What updates cost a worker that runs samples: `make bench-updates` (benchmarks/README.md has its figures).

One worker with a real engine generates with no updates, and with a version every so many seconds in each mode. `ratio`
is tokens per second over those of the same load without updates, which is measured before and after the modes of each
interval.
--shape: a model of such shapes with random weights, on the last GPU, and the trainer on the first one; otherwise a tiny
one on the CPU.
With "auto" the samples of one case are rebuilt by an own forward pass afterwards, each token on the cache it had.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rolloutmq import (
    BlockingRolloutClient,
    GenerateJob,
    PublishHandle,
    RolloutResult,
    SamplingParams,
    WeightPublisher,
)
from rolloutmq.messages.errors import WaitTimeout
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

from .harness import Run, option
from .sync.shapes import one_shape
from .workers import working

MODES = ("resume", "in_place", "auto")
CASE_S, VERSIONS, LONGEST = 10.0, 2.5, 3.0
"""A case takes so many seconds without updates, or as long as so many versions, or as its longest sample. One that
takes LONGEST times as long is stopped, and counted by what it has generated."""
CHECKED = (1000, 1.0)
"""Context and interval of the case whose samples are rebuilt."""


@dataclass(frozen=True, slots=True)
class Load:
    """Samples at once, tokens of their prompts and new ones, and seconds between versions; 0 for none."""

    context: int
    running: int
    new_tokens: int
    mode: str = "none"
    every_s: float = 0.0

    @property
    def case_s(self) -> float:
        return max(CASE_S, VERSIONS * self.every_s)


class Trainer:
    """Its tensors, which change with every version."""

    def __init__(self, model: Path, shape: str) -> None:
        if shape:
            kinds = [*one_shape(shape).tensors()]
            most = max(math.prod(size) for _, size in kinds)
            # All tensors are parts of one, because publications need the memory of four copies.
            self.values = torch.randn(most, dtype=torch.bfloat16, device="cuda") * 0.02
            self.tensors = {name: self.values[: math.prod(size)].view(size) for name, size in kinds}
        else:
            self.tensors = load_file(model / "model.safetensors")
        self.on_gpu = bool(shape)

    def publish(self, publisher: WeightPublisher) -> PublishHandle:
        version = publisher.last_version + 1
        if self.on_gpu:
            self.values.neg_()
            return publisher.publish(version, self.tensors)
        factor = 1 + version % 97 / 4096
        return publisher.publish(version, {name: tensor * factor for name, tensor in self.tensors.items()})


class Side:
    """A pool of one worker, and its trainer."""

    def __init__(self, model: Path, url: str, trainer: Trainer) -> None:
        self.model, self.url, self.trainer = model, url, trainer
        self.snapshots = Path(tempfile.mkdtemp(prefix="rolloutmq-versions-"))
        self.cases = 0
        self.kept: list[tuple[GenerateJob, list[RolloutResult]]] = []

    @contextmanager
    def worker(self, log: Path, *options: str) -> Iterator[None]:
        gpu = ""
        if self.trainer.on_gpu:
            every = [str(number) for number in range(torch.cuda.device_count())]
            gpu = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",")[-1]
        with working(self.model, self.url, log, *options, gpu=gpu) as worker:
            with BlockingRolloutClient(self.url) as client:
                worker.until_serving(client)
            yield

    def measure(self, load: Load, waves: int, wave_s: float, *, keep: bool = False) -> dict[str, Any]:
        """Tokens per second of this load, in so many waves, which take `wave_s` each without updates.

        keep: keep what the samples and the versions were, too.
        """
        self.cases += 1
        draw = random.Random(f"{load} {self.cases}")  # prompts that were there before would be in the prefix cache
        sampling = SamplingParams(max_new_tokens=load.new_tokens, ignore_eos=True)
        jobs = [
            GenerateJob(token_ids=[draw.randrange(3, 250) for _ in range(load.context)], sampling=sampling)
            for _ in range(waves * load.running)
        ]
        results, limit_s = list[RolloutResult](), LONGEST * max(load.case_s, waves * wave_s)
        with self._publishing(load, keep=keep), BlockingRolloutClient(self.url) as client:
            began = time.monotonic()
            client.submit_many(jobs[: load.running])
            more = iter(jobs[load.running :])
            with suppress(WaitTimeout):
                while (left := began + limit_s - time.monotonic()) > 0 and client.outstanding:
                    result = next(client.results(timeout=left))
                    assert isinstance(result, RolloutResult), result
                    results.append(result)
                    client.submit_many(islice(more, 1))  # so many run at once, not more
            took, ended = time.monotonic() - began, not client.outstanding
            tokens = sum(len(result.token_ids) for result in results)
            if not ended:
                tokens += sum(worker.unfinished_tokens for worker in client.workers())
                client.cancel_all()
        if keep:
            by_id = {job.id: job for job in jobs}
            self.kept = [(by_id[result.job_id], [result]) for result in results]
        versions = {version for result in results for version in result.versions}
        found = {"context": load.context, "running": load.running, "mode": load.mode, "every_s": load.every_s}
        return found | {
            "tokens_per_s": round(tokens / took, 1),
            "seconds": round(took, 1),
            "versions": len(versions),
            "ended": ended,
        }

    @contextmanager
    def _publishing(self, load: Load, *, keep: bool) -> Iterator[None]:
        """Versions come in this block. A first one has come before: with it a trainer and workers connect."""
        if load.mode == "none":
            yield
            return
        stop = threading.Event()
        saving: Any = {"snapshots": str(self.snapshots), "keep_snapshots": 10_000} if keep else {}
        keep_on: Any = {"keep": "device"} if self.trainer.on_gpu else {}  # host memory would be another way
        mode: Any = load.mode
        with WeightPublisher(self.url, mode=mode, **saving, **keep_on) as publisher:
            self.trainer.publish(publisher).wait(60)

            def publish() -> None:
                while not stop.wait(load.every_s):
                    self.trainer.publish(publisher)

            publishing = threading.Thread(target=publish)
            publishing.start()
            try:
                yield
            finally:
                stop.set()
                publishing.join()

    def rebuilt(self) -> dict[str, Any]:
        """The kept samples' tokens beside an own forward pass of the versions they name."""
        from rolloutmq.ops.replay import Recorded, Settings
        from rolloutmq.ops.replay.checks.score import score

        samples = [Recorded(result, job, 0.0) for job, results in self.kept for result in results]
        verdicts = score(samples, Settings(model=str(self.model), snapshots=self.snapshots))
        return {
            "samples": len(samples),
            "tokens": sum(len(one.result.token_ids) for one in samples),
            "with_both": sum(bool(one.result.legs and one.result.in_place) for one in samples),
            "states": {state: sum(it.state == state for it in verdicts) for state in {it.state for it in verdicts}},
            "largest_gap": max((float(it.largest_gap) for it in verdicts), default=0.0),
            "reasons": sorted({reason for it in verdicts for reason in it.reasons})[:3],
        }


def measure_load(side: Side, none: Load, intervals: list[float], modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Each mode at each interval. Before and after an interval it is measured without updates."""
    # Warms up: the first time of a load is slower. The second one says how long a wave of samples takes.
    first = math.ceil(CASE_S / side.measure(none, 1, CASE_S)["seconds"])
    wave_s = side.measure(none, first, CASE_S)["seconds"] / first

    def measured(load: Load) -> dict[str, Any]:
        keep = (load.context, load.every_s, load.mode) == (*CHECKED, "auto") and not side.trainer.on_gpu
        return side.measure(load, max(1, round(load.case_s / wave_s)), wave_s, keep=keep)

    before = measured(none)
    for every_s in intervals:
        cases = [measured(replace(none, mode=mode, every_s=every_s)) for mode in modes]
        after = measured(none)
        still = (before["tokens_per_s"] + after["tokens_per_s"]) / 2
        for case in [before | {"every_s": every_s}, *cases, after | {"every_s": every_s}]:
            case["ratio"] = round(case["tokens_per_s"] / still, 3)
            print(json.dumps(case), file=sys.stderr, flush=True)
            yield case
        before = after


def run_side(plan: Plan, model: Path) -> Iterator[list[dict[str, Any]]]:
    """What has been measured, after each load."""
    found: list[dict[str, Any]] = []
    with EmbeddedRedis() as server:
        side = Side(model, server.url, Trainer(model, plan.shape))
        with side.worker(model / "worker.log", *plan.worker.split()):
            for context, running in (map(int, pair.split(":")) for pair in plan.loads.split(",")):
                none, intervals = Load(context, running, plan.new_tokens), [*map(float, plan.every.split(","))]
                found += measure_load(side, none, intervals, plan.modes.split(","))
                yield found
        if side.kept:
            yield [*found, {"rebuilt": side.rebuilt()}]


def write_model(folder: Path, shape: str) -> None:
    if not shape:
        write_tiny_model(folder, dtype="float32")
        return
    one_shape(shape).write(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    loads: str = option("100:8,100:32,1000:8,1000:32,3000:8,3000:32", "Tokens of the prompts, and samples at once.")
    every: str = option("0.25,1,5", "Seconds between versions.")
    modes: str = option(",".join(MODES), f"Some of {','.join(MODES)}.")
    new_tokens: int = option(200, "Of a sample.", min=1)
    shape: str = option("", "As of `python -m benchmarks sync`; needs a GPU.")
    worker: str = option("--dtype float32 --max-total-tokens 131072 --device cpu", "Further arguments of the worker.")


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """What updates cost a worker that runs samples: tokens/s with versions over those without, in each mode."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), plan.shape)
        for found["now"] in run_side(plan, Path(folder)):
            run.keep(found)
    return found
