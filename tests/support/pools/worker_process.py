"""A real `rolloutmq worker` as an operator starts it: a process of its own, with a real SGLang engine in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

COMMAND = [sys.executable, "-m", "rolloutmq.ops.entry"]


class WorkerProcess:
    """Started at once, ready when `wait_joined` returns. Everything it prints goes to `log`."""

    def __init__(self, model: Path, redis_url: str, log: Path, *options: str) -> None:
        self.log = log
        self._out = log.open("wb")
        self.process = subprocess.Popen(
            [*COMMAND, "worker", "--model", str(model), "--redis", redis_url, "--lease", "3", *options],
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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
        self._out.close()

    def terminate(self, timeout_s: float) -> int:
        """SIGTERM; returns the exit code."""
        self.process.terminate()
        code = self.process.wait(timeout_s)
        self._out.close()
        return code
