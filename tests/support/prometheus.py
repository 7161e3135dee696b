"""A real Prometheus, from Debian's package `prometheus`, for one test."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PR_SET_PDEATHSIG = 1
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="Debian's package prometheus is not installed")
needs_prometheus = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="Debian's package prometheus is not installed"
)


def promtool(*arguments: str | Path, cwd: Path) -> str:
    """What promtool says; it has to be content."""
    shown = subprocess.run(["promtool", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return shown.stdout


class Prometheus:
    """A server with its own folder. `port` is None until it listens."""

    def __init__(self, log: Path) -> None:
        self._log = log

    @property
    def port(self) -> int | None:
        found = re.search(r'msg="Listening on" address=127\.0\.0\.1:(\d+)', self._log.read_text())
        return int(found[1]) if found and "Server is ready" in self._log.read_text() else None

    def _asked(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[float]:
        """The values of an instant query now."""
        found = self._asked("query?" + urllib.parse.urlencode({"query": expression}))["result"]
        return [float(one["value"][1]) for one in found]

    def rules(self) -> dict[str, str]:
        """Each alert rule's health: unknown until it was evaluated, then ok or err."""
        groups = self._asked("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}


def _with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def prometheus(config: str, folder: Path) -> Iterator[Prometheus]:
    """Run one with this configuration. It ends with the block, and with this process."""
    (folder / "prometheus.yml").write_text(config)
    command = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    command += ["--web.listen-address=127.0.0.1:0"]
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, preexec_fn=_with_parent)  # noqa: PLW1509
    try:
        yield Prometheus(log)
    finally:
        process.kill()
        process.wait()
