"""A real worker's process, for as long as a block lasts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rolloutmq import BlockingRolloutClient
from rolloutmq.messages.model import WorkerStatus

from .parts import BenchFailed

LAST_WORDS = 3000
START_S = 600.0


class RealWorker:
    """`rolloutmq worker` in a session of its own, with a log."""

    def __init__(self, model: Path, url: str, log: Path, *options: str, gpu: str = "") -> None:
        command = [
            sys.executable,
            "-m",
            "rolloutmq.ops.entry",
            "worker",
            f"--model={model}",
            f"--redis={url}",
            *options,
        ]
        chosen = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True, env=os.environ | chosen
            )

    def until(
        self, client: BlockingRolloutClient, ready: Callable[[WorkerStatus], bool], timeout_s: float, every_s: float
    ) -> WorkerStatus:
        """The first of the pool's workers that is ready. Raises BenchFailed, also when this one ends."""
        deadline = time.monotonic() + timeout_s
        while not (found := [worker for worker in client.workers() if ready(worker)]):
            self.check()
            if time.monotonic() > deadline:
                raise BenchFailed(f"no worker is ready within {timeout_s:g} s")
            time.sleep(every_s)
        return found[0]

    def check(self) -> None:
        """Raises BenchFailed with its last words if it has ended."""
        if self.process.poll() is not None:
            raise BenchFailed(f"a worker ended: {self._log.read_text(errors='replace')[-LAST_WORDS:]}")

    def until_serving(self, client: BlockingRolloutClient) -> None:
        self.until(client, lambda worker: worker.state == "serving", START_S, 0.2)

    def end(self) -> None:
        """Drain it, so that the next one has its memory, or kill all of it."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """All of it at once, as if its machine were lost."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def working(model: Path, url: str, log: Path, *options: str, gpu: str = "") -> Iterator[RealWorker]:
    worker = RealWorker(model, url, log, *options, gpu=gpu)
    try:
        yield worker
    finally:
        worker.end()
