"""How long a worker takes from the start of its process to its first token at the pool's version, phase by phase.

    python -m benchmarks startup --shape tiny --out benchmarks/results/startup-cpu.json
    python -m benchmarks startup --shape 8b --device cuda --out benchmarks/results/startup-h200.json

It writes a checkpoint with random weights, starts a worker with nothing compiled ("cold"), and publishes version 1 to
it. Then it starts workers in a pool that has a version, each in a process of its own, after the one before has
ended. A job waits in the queue for each; the time ends when the client has its token. The ways to start are made of the
worker's options:

    before   --first-weights checkpoint
    after    --first-weights newest

All but "cold" find what it compiled (`--cache-dir`). The version comes from a trainer on the same GPU, from a snapshot,
or, when the trainer is gone, from a peer on the first GPU to a worker on the second. With a peer there is no job,
because the peer would answer it: the time ends when the worker serves.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.worker.metrics import PHASES

from .harness import Run, names, option
from .sync.shapes import one_shape, write_random
from .workers import RealWorker, working

WAYS = {
    "before": ("--first-weights", "checkpoint"),
    "after": ("--first-weights", "newest"),
}
SOURCES = ("trainer", "snapshot", "peer")
START_S = 540.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start."""

    shape: str = option("tiny", "One of `python -m benchmarks sync --shapes`.")
    device: str = option("cpu", "cpu or cuda.")
    ways: str = option(",".join(WAYS), f"Some of {','.join(WAYS)}.")
    sources: str = option("trainer", f"Some of {','.join(SOURCES)}.")
    rounds: int = option(1, "Starts of each way from each source.", min=1)
    mem_fraction: float = option(0.3, "The engine's share of the GPU's memory.")
    sglang: list[str] = option([], "NAME=JSON for the workers; repeatable.")


class Bench:
    """Starts workers in one pool. rows: what was measured."""

    def __init__(self, plan: Plan, url: str, folder: Path, run: Run) -> None:
        self.plan, self.url, self.folder, self.run = plan, url, folder, run
        self.model, self.snapshots, self.cache = folder / "model", folder / "snapshots", folder / "cache"
        self.rows: list[dict[str, Any]] = []
        self.weights = write_random(one_shape(plan.shape), self.model, plan.device)

    def worker(self, name: str, *options: str, gpu: int = 0) -> AbstractContextManager[RealWorker]:
        options += (f"--cache-dir={self.cache}", "--dtype=bfloat16", f"--mem-fraction={self.plan.mem_fraction}")
        options += ("--drain=1", "--log-level=info")
        options += tuple(f"--sglang={setting}" for setting in self.plan.sglang)
        chosen = "" if self.plan.device == "cpu" else str(gpu)
        return working(self.model, self.url, self.folder / f"{name}.log", *options, gpu=chosen)

    def measure(
        self, way: str, source: str, version: int, *options: str, gpu: int = 0, then: Callable[[], None] | None = None
    ) -> None:
        """Start one worker, and wait for its first token at this version. Then do that while it serves."""
        name = f"{len(self.rows)}-{way}-{source}"
        job = GenerateJob(token_ids=[5, 6, 7], min_version=version, sampling=SamplingParams(max_new_tokens=1))
        with BlockingRolloutClient(self.url) as client:
            before = {worker.worker_id for worker in client.workers()}
            handle = None if before else client.submit(job)  # a peer would answer it
            began = time.monotonic()
            with self.worker(name, *options, gpu=gpu) as worker:
                mine = worker.until(client, lambda one: one.worker_id not in before, START_S, 0.02).worker_id
                if handle is not None:
                    (result,) = client.wait(handle, START_S)
                    assert result.versions == (version,), result.versions
                token_s = time.monotonic() - began
                told = {"weights"} if handle is None else {"weights", "first_answer"}  # by the next heartbeat
                seen = worker.until(client, lambda it: it.worker_id == mine and told <= it.startup.keys(), START_S, 0.1)
                served = sum(seen.startup[phase] for phase in PHASES[:-1] if phase in seen.startup)
                total = round(served if handle is None else token_s, 2)
                row = {"way": way, "source": source, "version": version, "first_token_s": total}
                self.rows.append(row | seen.startup)
                self.run.say(**self.rows[-1])
                self.run.keep(self.figures())
                if then is not None:
                    then()

    def run_all(self, ways: list[str], sources: list[str]) -> None:
        snapshots = ("--snapshots", str(self.snapshots)) if "snapshot" in sources else ()
        with WeightPublisher(self.url, snapshots=self.snapshots if snapshots else None) as trainer:

            def publish() -> None:
                report = trainer.publish(trainer.last_version + 1, self.weights.items()).wait(START_S)
                assert report.state == "committed", report

            self.measure("cold", "checkpoint", 0, *WAYS["before"], then=publish)
            if "trainer" in sources:
                self._each(ways, "trainer", trainer.last_version)
            if "peer" in sources:
                with self.worker("peer", *WAYS["after"]) as peer, BlockingRolloutClient(self.url) as client:
                    peer.until(client, lambda one: one.version == trainer.last_version, START_S, 0.2)
                    publish()  # who comes late to a version does not always offer it; the peer is there for this one
                    trainer.close()
                    self._each(ways, "peer", trainer.last_version, gpu=1)
        if snapshots:
            self._each(ways, "snapshot", trainer.last_version, *snapshots)

    def _each(self, ways: list[str], source: str, version: int, *options: str, gpu: int = 0) -> None:
        for _ in range(self.plan.rounds):
            for way in ways:
                self.measure(way, source, version, *WAYS[way], *options, gpu=gpu)

    def figures(self) -> dict[str, Any]:
        return {"gigabytes": round(sum(tensor.nbytes for tensor in self.weights.values()) / 1e9, 2), "rows": self.rows}


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """How long a worker takes from the start of its process to its first token at the pool's version, by phase."""
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as redis:
        bench = Bench(plan, redis.url, Path(scratch), run)
        bench.run_all(names("--ways", plan.ways, WAYS), names("--sources", plan.sources, SOURCES))
        return bench.figures()
