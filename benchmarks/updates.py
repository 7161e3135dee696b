"""What updates cost a worker that runs samples: `make bench-updates` (docs/weights.md has its figures).

One worker with a real engine generates with no updates, and with a version every so many seconds in each mode. `ratio`
is tokens per second over those of the same load without updates, which is measured before and after the modes.
--before: a folder with an older rolloutmq package, which is measured in the same run, in a process of its own.
With "auto" the samples of one case are rebuilt by an own forward pass afterwards, each token on the cache it had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from rolloutmq.ops.bench.broker import describe_host
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model

NEW_TOKENS, WAVES = 200, 2
LONGEST_S = 40.0
"""A case that is slower is stopped, and counted by what it has generated."""
EVERY_S = (0.25, 1.0, 5.0)
BEFORE = 1000
"""The one context with which the older package is measured: a case may take LONGEST_S."""
CHECKED = (1000, 1.0)
"""Context and interval of the case whose samples are rebuilt."""


@dataclass(frozen=True, slots=True)
class Load:
    """Samples at once, tokens of their prompts, and seconds between versions; 0 for none."""

    context: int
    running: int
    mode: str = "none"
    every_s: float = 0.0


class Side:
    """A pool of one worker, and its trainer."""

    def __init__(self, model: Path, url: str) -> None:
        self.model, self.url = model, url
        self.tensors = load_file(model / "model.safetensors")
        self.snapshots = Path(tempfile.mkdtemp(prefix="rolloutmq-versions-"))
        self.kept: list[tuple[GenerateJob, list[RolloutResult]]] = []

    @contextmanager
    def worker(self, command: list[str]) -> Iterator[None]:
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                with BlockingRolloutClient(self.url) as client:
                    while not any(worker.state == "serving" for worker in client.workers()):
                        if process.poll() is not None:
                            log.seek(0)
                            raise SystemExit(log.read()[-3000:])
                        time.sleep(0.2)
                yield
            finally:
                process.terminate()
                process.wait(60)

    def measure(self, load: Load, keep: bool = False) -> dict[str, Any]:
        """Tokens per second of this load."""
        draw = random.Random(f"{load}")
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        jobs = [
            GenerateJob(token_ids=[draw.randrange(3, 250) for _ in range(load.context)], sampling=sampling)
            for _ in range(WAVES * load.running)
        ]
        stop = threading.Event()
        if keep:  # what the samples begin with is kept, too
            with self._publisher(load, keep) as publisher:
                self._send(publisher).wait(60)
        with BlockingRolloutClient(self.url) as client:
            publishing = threading.Thread(target=self._publish, args=(load, stop, keep))
            publishing.start()
            began, tokens, versions, results = time.monotonic(), 0, set[int](), list[RolloutResult]()
            client.submit_many(jobs)
            with suppress(WaitTimeout):
                while (left := began + LONGEST_S - time.monotonic()) > 0 and client.outstanding:
                    result = next(client.results(timeout=left))
                    assert isinstance(result, RolloutResult), result
                    results.append(result)
                    tokens += len(result.token_ids)
                    versions |= set(result.versions)
            took, ended = time.monotonic() - began, not client.outstanding
            if not ended:
                tokens += sum(worker.unfinished_tokens for worker in client.workers())
                client.cancel_all()
            stop.set()
            publishing.join()
        if keep:
            by_id = {job.id: job for job in jobs}
            self.kept = [(by_id[result.job_id], [result]) for result in results]
        found = {"context": load.context, "running": load.running, "mode": load.mode, "every_s": load.every_s}
        return found | {"tokens_per_s": round(tokens / took, 1), "versions": len(versions), "ended": ended}

    def _publish(self, load: Load, stop: threading.Event, keep: bool) -> None:
        if load.mode == "none":
            return
        with self._publisher(load, keep) as publisher:
            while not stop.wait(load.every_s):
                self._send(publisher)

    def _publisher(self, load: Load, keep: bool) -> WeightPublisher:
        saving: Any = {"snapshots": str(self.snapshots), "keep_snapshots": 10_000} if keep else {}
        mode: Any = load.mode
        return WeightPublisher(self.url, mode=mode, **saving)

    def _send(self, publisher: WeightPublisher) -> PublishHandle:
        version = publisher.last_version + 1
        return publisher.publish(
            version, {name: tensor * (1 + version % 97 / 4096) for name, tensor in self.tensors.items()}
        )

    def rebuilt(self) -> dict[str, Any]:
        """The kept samples' tokens beside an own forward pass of the versions they name."""
        from rolloutmq.ops.replay import Recorded, Weights  # noqa: PLC0415
        from rolloutmq.ops.replay.checks.score import score  # noqa: PLC0415
        from rolloutmq.ops.replay.settings import Settings  # noqa: PLC0415

        samples = [Recorded(result, job, 0.0) for job, results in self.kept for result in results]
        verdicts = score(samples, Weights(str(self.model), Settings(snapshots=self.snapshots)))
        return {
            "samples": len(samples),
            "tokens": sum(len(one.result.token_ids) for one in samples),
            "with_both": sum(bool(one.result.legs and one.result.in_place) for one in samples),
            "states": {state: sum(it.state == state for it in verdicts) for state in {it.state for it in verdicts}},
            "largest_gap": max((float(it.largest_gap) for it in verdicts), default=0.0),
        }


def cases(contexts: list[int], running_each: list[int], before: bool) -> Iterator[list[Load]]:
    """Loads that belong together: none first and last, and the modes between."""
    for context in contexts:
        for running in running_each:
            if before and context != BEFORE:
                continue
            none, modes = Load(context, running), ("resume",) if before else ("resume", "in_place", "auto")
            yield [none, *(Load(context, running, mode, each) for each in EVERY_S for mode in modes), none]


def run_side(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with EmbeddedRedis() as server:
        side = Side(model, server.url)
        run = "from rolloutmq.ops.entry import main; main()"
        told = ["--redis", server.url, "--model", str(model), "--dtype", "float32", "--max-total-tokens", "131072"]
        with side.worker([sys.executable, "-c", run, "worker", *told, "--device", "cpu"]):
            for group in cases(*(list(map(int, told.split(","))) for told in (args.contexts, args.running)), args.side):
                side.measure(group[0])  # warms up: the first time of a load is slower
                measured = [
                    side.measure(load, not args.side and (load.context, load.every_s) == CHECKED
                                 and load.mode == "auto")
                    for load in group
                ]  # fmt: skip
                still = (measured[0]["tokens_per_s"] + measured[-1]["tokens_per_s"]) / 2
                for one in measured:
                    one["ratio"] = round(one["tokens_per_s"] / still, 3)
                    print(json.dumps(one), file=sys.stderr if args.side else sys.stdout, flush=True)
                found += measured
        if side.kept:
            found.append({"rebuilt": side.rebuilt()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    parser.add_argument("--contexts", default="100,1000,3000", help="tokens of the prompts, one number after the other")
    parser.add_argument("--running", default="8,32", help="samples at once, one number after the other")
    parser.add_argument("--before", type=Path, help="folder that has an older package `rolloutmq`")
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)  # this is the older one's process
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), dtype="float32")
        now = run_side(args, Path(folder))
    if args.side:
        print(json.dumps(now))
        return
    with EmbeddedRedis() as server:
        found: dict[str, Any] = {"host": describe_host(server.url, []), "torch": torch.__version__, "now": now}
    if args.before is not None:
        command = [sys.executable, __file__, "--side", "--running", args.running, "--contexts", args.contexts]
        older = os.environ | {"PYTHONPATH": str(args.before)}
        ran = subprocess.run(command, env=older, stdout=subprocess.PIPE, check=True)
        found["before"] = json.loads(ran.stdout.splitlines()[-1])
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
