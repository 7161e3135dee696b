"""Other processes of a benchmark. Each runs one function, is spoken to in lines, and ends with its input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rolloutmq.messages.errors import RolloutMQError


class BenchFailed(RolloutMQError):
    """A process of a benchmark did not do its part."""


class Part:
    """A process that runs `function(*arguments)`, which are plain data. Use it in a block: after that it has ended."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.name = f"{function.__module__}.{function.__name__}"
        code = f"import json, sys; from {function.__module__} import {function.__name__} as run; "
        command = [sys.executable, "-c", code + "run(*json.loads(sys.argv[1]))", json.dumps(arguments)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pid, self.kill = self._process.pid, self._process.kill

    def line(self) -> str:
        """The next line that it prints. Raises BenchFailed if it ended instead."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise BenchFailed(f"{self.name} ended with {self._process.wait()}")
        return line

    def tell(self, text: str = "") -> None:
        """Give it a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """What the last line says, as JSON, once it has ended by itself. Raises BenchFailed."""
        assert self._process.stdout is not None
        said = self._process.stdout.read().splitlines()
        if self._process.wait() or not said:
            raise BenchFailed(f"{self.name} ended with {self._process.returncode}")
        return json.loads(said[-1])

    def __enter__(self) -> Part:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None:
            self.kill()
        self._process.communicate()


def busy_s(cpu: Mapping[str, Any]) -> float:
    """CPU seconds of a Redis since it started, of its `INFO cpu`."""
    return float(cpu["used_cpu_user"] + cpu["used_cpu_sys"])
