"""The demo's workers. Each is a `rolloutmq worker` process with a real SGLang engine, and none outlives the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from ...messages.errors import EngineError
from ..redis import parent_bound

DRAIN_S = 5.0
_ON_GPU = (  # two engines and the trainer may share a GPU, and nobody waits for kernels to be tuned
    "max_total_tokens=200000",
    "attention_backend=triton",
    "sampling_backend=pytorch",
    "disable_prefill_cuda_graph=true",
    "mem_fraction_static=0.3",
)
GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The settings that the demo's workers share.

    lease_s: seconds until a killed worker's jobs go to others. gpus: their ids, the trainer's first; empty on the CPU.
    prefix_cache: whether engines keep prefixes. For the demo's prompts of six tokens that costs more than it saves.
    """

    redis_url: str
    pool: str
    model: Path
    logs: Path
    max_running: int = 128
    lease_s: float = 3.0
    gpus: tuple[str, ...] = ()
    prefix_cache: bool = False

    def command(self) -> list[str]:
        """The worker's command line."""
        options = {
            "--redis": self.redis_url,
            "--pool": self.pool,
            "--model": str(self.model),
            "--dtype": "bfloat16" if self.gpus else "float32",
            "--max-running": str(self.max_running),
            "--lease": str(self.lease_s),
            "--drain": str(DRAIN_S),
            "--cpu-threads": "1",
            "--sglang": f"disable_radix_cache={str(not self.prefix_cache).lower()}",
            "--log-level": "info",
        }
        pairs = [*options.items(), *(("--sglang", setting) for setting in (_ON_GPU if self.gpus else ()))]
        return [sys.executable, "-m", "rolloutmq.ops.entry", "worker", *(word for pair in pairs for word in pair)]


class WorkerProcess:
    """One worker. It has a session of its own, so that a kill takes its engine's processes along."""

    def __init__(self, name: str, settings: PoolSettings, gpu: str = "") -> None:
        self.name, self.gpu = name, gpu
        self.log = settings.logs / f"{name}.log"
        self.started = time.monotonic()
        self.killed = False
        bound = [sys.executable, "-I", "-S", parent_bound.__file__, str(os.getpid()), ""]
        with self.log.open("wb") as log:
            self._supervisor = subprocess.Popen(
                [*bound, *settings.command()],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env=os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
            )  # fmt: skip
        assert self._supervisor.stdout is not None
        self.pid = int(self._supervisor.stdout.readline() or 0)

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs."""
        return self._supervisor.poll() is None

    def kill(self) -> None:
        """SIGKILL it and all that it started, as if its machine were lost. Return when its process is gone."""
        self.killed = True
        os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()
        deadline = time.monotonic() + GONE_S
        while runs(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def drain(self) -> None:
        """Ask it to hand back what it cannot finish, and leave."""
        self._supervisor.terminate()

    def ended(self, timeout_s: float) -> int | None:
        """Exit code, or None if it still runs after `timeout_s`."""
        try:
            return self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def dispose(self) -> None:
        """Leave nothing behind."""
        if self.alive:
            self.kill()
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                pipe.close()


class Workers:
    """All workers the demo has started, by name; leaving the block ends those that still run."""

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self.all: dict[str, WorkerProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.all.values():
            worker.dispose()

    def start(self) -> WorkerProcess:
        """Start one more. It is up when the pool lists it as serving, some seconds later."""
        name = f"worker-{len(self.all) + 1}"
        self.all[name] = worker = WorkerProcess(name, self._settings, self._free_gpu())
        return worker

    def _free_gpu(self) -> str:
        """The GPU with the fewest workers; of equal ones the trainer's last. "" on the CPU."""
        first, *others = self._settings.gpus or ("",)
        taken = [worker.gpu for worker in self.all.values() if worker.alive]
        return min((*others, first), key=taken.count)

    def check(self) -> None:
        """Raise EngineError if a worker ended although nobody killed it."""
        for worker in self.all.values():
            if not worker.alive and not worker.killed:
                raise EngineError(f"{worker.name} ended by itself; the end of {worker.log}:\n{worker.last_words()}")

    def drain(self) -> dict[str, int | None]:
        """Let all running workers leave in good order. Returns exit codes by name; None for one that still runs."""
        leaving = [worker for worker in self.all.values() if worker.alive]
        for worker in leaving:
            worker.drain()
        deadline = time.monotonic() + DRAIN_S + 15.0
        return {worker.name: worker.ended(max(0.1, deadline - time.monotonic())) for worker in leaving}


def runs(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
