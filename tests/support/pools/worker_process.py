"""A real `rolloutmq worker`: a process of its own, with a real SGLang engine in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from support.engines.forking import Forked, command_line

from rolloutmq import BlockingRolloutClient

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry"]
ROOMY = ("--mem-fraction", "0.3")
"""SGLang takes what other processes allocate while it starts for its own, and tests run beside each other."""


def until_running(client: BlockingRolloutClient, count: int, *, on_each: bool = False) -> None:
    """Until so many samples run in the pool, or on each of its workers, as their heartbeats say."""
    deadline = time.monotonic() + 60
    while True:
        running = [worker.running for worker in client.workers()]
        if (min(running, default=0) if on_each else sum(running)) >= count:
            return
        assert time.monotonic() < deadline, running
        time.sleep(0.02)  # between two looks: whoever looks without a pause takes the engine's core


class WorkerProcess:
    """Started at once, ready when `wait_joined` returns. Everything it prints goes to `log`.

    forked: what it imports is there already; without, it is a program that starts from nothing, as operators start it.
    """

    process: Forked | subprocess.Popen[bytes]

    def __init__(self, model: Path, redis_url: str, log: Path, *options: str, forked: bool = True) -> None:
        self.log = log
        command = ["worker", "--model", str(model), "--redis", redis_url, "--lease", "3", *ROOMY, *options]
        log.write_text("")
        if forked:
            self.process = Forked(command_line, *command, log=log)
            return
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*COMMAND, *command], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_text(self, expected: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while expected not in self.text():
            assert self.process.poll() is None, f"the worker ended with {self.process.returncode}:\n{self.text()}"
            assert time.monotonic() < deadline, f"{expected!r} did not come:\n{self.text()}"
            time.sleep(0.05)  # between two looks at the log

    def wait_joined(self) -> None:
        self.wait_text("joined pool")

    @property
    def worker_id(self) -> str:
        return self.text().rsplit("joined pool", 1)[1].split(" as ", 1)[1].split()[0]

    def family(self) -> list[psutil.Process]:
        """The worker and every process it started."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """What a lost pod looks like: everything is gone at once, without a word."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        return self.process.wait(timeout_s)
