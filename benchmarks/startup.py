"""How long a worker takes from the start of its process to its first token at the pool's version, phase by phase.

    python -m benchmarks.startup --shape tiny --out benchmarks/results/startup-cpu.json
    python -m benchmarks.startup --shape 8b --device cuda --host '1x H200' --out benchmarks/results/startup-h200.json

It writes a checkpoint with random weights, starts a worker with nothing compiled ("cold"), and publishes version 1.
Then it starts workers in a pool that has that version, each in a process of its own, after the one before has ended. A
job waits in the queue for each; the time ends when the client has its token. The ways to start are made of the worker's
options:

    before   --first-weights checkpoint
    after    --first-weights newest

All but "cold" find what it compiled (`--cache-dir`). The version comes from a trainer on the same GPU, from a snapshot,
or from a peer, which has the second GPU. With a peer there is no job, because the peer would answer it: the time ends
when the worker serves.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.metrics import PHASES

from .sync.shapes import one_shape

WAYS = {
    "before": ("--first-weights", "checkpoint"),
    "after": ("--first-weights", "newest"),
}
SOURCES = ("trainer", "snapshot", "peer")
START_S = 540.0


class Bench:
    """Starts workers in one pool. rows: what was measured."""

    def __init__(self, given: argparse.Namespace, url: str, folder: Path) -> None:
        self.given, self.url, self.folder = given, url, folder
        self.model, self.snapshots, self.cache = folder / "model", folder / "snapshots", folder / "cache"
        self.rows: list[dict[str, Any]] = []
        self.weights = self._write_model()

    def _write_model(self) -> dict[str, torch.Tensor]:
        """A checkpoint and a tokenizer of bytes. Returns the tensors, on the trainer's device."""
        shape = one_shape(self.given.shape)
        write_tiny_model(self.model)
        shape.write(self.model)
        random = torch.Generator(self.given.device).manual_seed(0)
        place: Any = {"generator": random, "device": self.given.device, "dtype": torch.bfloat16}
        tensors = {
            name: torch.randn(size, **place) * 0.02
            if len(size) > 1
            else torch.ones(size, device=self.given.device).bfloat16()
            for name, size in shape.tensors()
        }
        save_file(
            {name: tensor.cpu() for name, tensor in tensors.items()}, self.model / "model.safetensors", {"format": "pt"}
        )
        return tensors

    @contextmanager
    def worker(self, name: str, *options: str, gpu: int = 0) -> Iterator[subprocess.Popen[bytes]]:
        """A worker's process, in a session of its own. It is drained, so that the next one has its memory."""
        command = [
            sys.executable,
            "-m",
            "rolloutmq.ops.entry",
            "worker",
            "--model",
            str(self.model),
            "--redis",
            self.url,
        ]
        command += ["--dtype", "bfloat16", "--mem-fraction", str(self.given.mem_fraction), "--drain", "1"]
        command += ["--log-level", "info", *options, *(f"--sglang={setting}" for setting in self.given.sglang)]
        chosen = {} if self.given.device == "cpu" else {"CUDA_VISIBLE_DEVICES": str(gpu)}
        with (self.given.logs / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=os.environ | chosen)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def measure(self, way: str, source: str, version: int, *options: str) -> None:
        """Start one worker, and wait for its first token at this version."""
        name = f"{len(self.rows)}-{way}-{source}"
        job = GenerateJob(token_ids=[5, 6, 7], min_version=version, sampling=SamplingParams(max_new_tokens=1))
        with BlockingRolloutClient(self.url) as client:
            before = {worker.worker_id for worker in client.workers()}
            handle = None if before else client.submit(job)  # a peer would answer it
            began = time.monotonic()
            with self.worker(name, *options) as process:
                deadline = began + START_S
                while not (mine := [one for one in client.workers() if one.worker_id not in before]):
                    assert process.poll() is None, f"{name}: the worker ended; see its log"
                    assert time.monotonic() < deadline, f"{name}: not within {START_S:g} s"
                    time.sleep(0.02)
                if handle is not None:
                    (result,) = client.wait(handle, START_S)
                    assert result.versions == (version,), result.versions
                token_s = time.monotonic() - began
                while True:  # the next heartbeat has all phases
                    (seen,) = [one for one in client.workers() if one.worker_id == mine[0].worker_id]
                    if {"weights", "first_answer"} <= seen.startup.keys() or (
                        handle is None and "weights" in seen.startup
                    ):
                        break
                    assert time.monotonic() < deadline, f"{name}: it does not serve"
                    time.sleep(0.1)
        served = sum(seen.startup[phase] for phase in PHASES[:-1] if phase in seen.startup)
        total = served if handle is None else token_s
        self.rows.append(
            {"way": way, "source": source, "version": version, "first_token_s": round(total, 2), **seen.startup}
        )
        print(json.dumps(self.rows[-1]), flush=True)

    def kept(self) -> tuple[str, ...]:
        return "--cache-dir", str(self.cache)

    def run(self) -> None:
        """Everything."""
        self.measure("cold", "checkpoint", 0, *WAYS["before"], *self.kept())
        with WeightPublisher(
            self.url, snapshots=self.snapshots if "snapshot" in self.given.sources else None
        ) as trainer:
            with self.worker("committer", *WAYS["before"], *self.kept()):
                self._until_workers()
                handle = trainer.publish(1, ((name, tensor) for name, tensor in self.weights.items()))
                report = handle.wait(START_S)
                assert report.state == "committed", report
            self._each("trainer")
        self._each("snapshot", "--snapshots", str(self.snapshots))
        if "peer" in self.given.sources:
            from_disk = ("--snapshots", str(self.snapshots)) if "snapshot" in self.given.sources else ()
            with self.worker("peer", *WAYS["after"], *self.kept(), *from_disk, gpu=1):
                self._until_workers(serving=True)
                self._each("peer")

    def _each(self, source: str, *options: str) -> None:
        for _ in range(self.given.rounds if source in self.given.sources else 0):
            for way in self.given.ways:
                self.measure(way, source, 1, *WAYS[way], *self.kept(), *options)
                self.write()

    def _until_workers(self, *, serving: bool = False) -> None:
        with BlockingRolloutClient(self.url) as client:
            deadline = time.monotonic() + START_S
            while not any(not serving or worker.version == 1 for worker in client.workers()):
                assert time.monotonic() < deadline, "no worker"
                time.sleep(0.2)

    def write(self) -> None:
        """Write what there is so far, and print it."""
        versions = {name: importlib.metadata.version(name) for name in ("torch", "sglang", "transformers")}
        told = {
            "what": "benchmarks/startup.py",
            "date": datetime.now(UTC).date().isoformat(),
            "host": self.given.host,
            "versions": versions | {"python": platform.python_version()},
            "command": shlex.join(["python", "benchmarks/startup.py", *sys.argv[1:]]),
            "gigabytes": round(sum(tensor.nbytes for tensor in self.weights.values()) / 1e9, 2),
            "rows": self.rows,
        }
        self.given.out.write_text(json.dumps(told, indent=2) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Seconds by phase, a row for each start."""
    head = ["way", "source", *PHASES, "first_token_s"]
    lines = [head, *([str(row.get(name, "")) for name in head] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def some_of(names: tuple[str, ...]) -> Any:
    """A reader of some names, separated by commas."""

    def read(text: str) -> list[str]:
        found = text.split(",")
        if strange := set(found) - set(names):
            raise argparse.ArgumentTypeError(f"{sorted(strange)}: some of {', '.join(names)}")
        return found

    return read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tiny", help="one of `python -m benchmarks sync --shapes`")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--ways", type=some_of(tuple(WAYS)), default=["before", "after"], help=f"some of {','.join(WAYS)}"
    )
    known = ",".join(SOURCES)
    parser.add_argument("--sources", type=some_of(SOURCES), default=["trainer"], help=f"some of {known}")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each way from each source")
    parser.add_argument("--mem-fraction", type=float, default=0.3)
    parser.add_argument("--sglang", action="append", default=[], help="NAME=JSON for the workers; repeatable")
    parser.add_argument("--folder", type=Path, help="for model, snapshots and caches; default: a temporary one")
    parser.add_argument("--logs", type=Path, help="for the workers' logs; default: in that folder")
    parser.add_argument("--host", default=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, no GPU")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as redis:
        folder = given.folder or Path(scratch)
        given.logs = given.logs or folder
        for each in (folder, given.logs):
            each.mkdir(parents=True, exist_ok=True)
        bench = Bench(given, redis.url, folder)
        try:
            bench.run()
        finally:
            bench.write()
            print(table(bench.rows))


if __name__ == "__main__":
    main()
