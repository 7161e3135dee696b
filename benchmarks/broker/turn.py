"""One turn of one system: its worker runs in one process and its client in another. Both end with the turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import redis

from ..parts import BenchFailed
from ..peers import Load

GRACE_S = 180.0
"""Seconds that a client may take beyond its load, to start, to warm up, and for jobs outstanding at the end."""
END_S = 2.0
"""Seconds that a worker has to leave by itself, before it is killed."""


@dataclass(frozen=True, slots=True)
class System:
    """A queue that is measured. It runs as `python -m module worker|client URL LOAD`.

    name: its key in the results. window, window_large: outstanding jobs that suit it, at 1 KB and at 256 KB payloads.
    path: put on PYTHONPATH. poll_s: seconds before its client asks for a result again, if it polls (at 1 KB).
    """

    name: str
    python: str
    module: str
    window: int
    window_large: int
    variant: str = ""
    path: str = ""
    poll_s: float = 0.02


def take_turn(system: System, url: str, load: Load) -> dict[str, Any]:
    """Return the figures of `system`'s client under `load`, on the emptied Redis at `url`. Raises BenchFailed."""
    with redis.Redis.from_url(url.partition("?")[0]) as admin:  # the query is for RolloutMQ's client and worker
        admin.flushall()
    env = {**os.environ, "BENCH_URL": url, "BENCH_VARIANT": system.variant, "PYTHONWARNINGS": "ignore"}
    if system.path:
        env["PYTHONPATH"] = system.path
    command = [system.python, "-m", system.module]
    with tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(
            [*command, "worker", url, load.to_json()],
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            client = subprocess.run(
                [*command, "client", url, load.to_json()],
                env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                timeout=load.warmup_s + load.seconds + GRACE_S,
            )  # fmt: skip
            if client.returncode or worker.poll() is not None:
                log.seek(0)
                said = log.read().decode(errors="replace")[-1500:]
                raise BenchFailed(
                    f"{system.name}: client ended with {client.returncode}: {client.stderr[-1500:]}\nworker: {said}"
                )
        except subprocess.TimeoutExpired as error:
            raise BenchFailed(f"{system.name}: the client was not done within {error.timeout:g} s") from None
        finally:
            _end(worker)
    figures: dict[str, Any] = json.loads(client.stdout.splitlines()[-1])
    return figures


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and its children, because some workers are a supervisor with children."""
    group = process.pid
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, how)
            process.wait(END_S)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait(END_S)
