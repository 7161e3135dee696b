"""What one run needs: a Redis with a replica behind a proxy, workers with real engines, the trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from chaos.proxy import Proxy
from support.engines.forking import Forked
from support.pools.clouds import PlayedCloud, played_cloud
from support.pools.worker_process import WorkerProcess
from support.redis.deployments import FAST_SYNC, follow, plain

from rolloutmq.ops.redis.embedded import EmbeddedRedis

from .record import END, ENGINE_DTYPE, GPU, steps_of

LEASE_S = 4.0
WORKER = (
    f"--dtype={ENGINE_DTYPE}", "--deterministic", "--max-running=16", "--max-total-tokens=16384",
    # Of a GPU's memory a share that the trainer's and another engine's does not count in.
    *(("--mem-fraction=0.6", "--attention-backend=triton", "--sampling-backend=pytorch", "--no-prefill-cuda-graph")
      if GPU else ("--mem-fraction=0.1",)),
    f"--lease={LEASE_S}", "--checkpoint=0.2", "--drain=4", "--spot=gcp",
)  # fmt: skip
LOOK_S = 0.05
Program = Callable[..., None]


class World:
    """Of one run. said: what went wrong, for whoever reads the log."""

    def __init__(self, model: Path, folder: Path, proxy: Proxy, stack: AsyncExitStack) -> None:
        self.model, self.folder, self.proxy, self._stack = model, folder, proxy, stack
        self.workers: list[tuple[WorkerProcess, PlayedCloud]] = []
        self.servers: list[EmbeddedRedis] = []  # the primary first
        self.trainer: Forked | None = None
        self._program: tuple[Program, tuple[Any, ...]] | None = None
        self._count = 0

    @property
    def url(self) -> str:
        return f"{self.proxy.url}?min_replicas=1"

    # --- workers ---------------------------------------------------------------------------------------------------

    async def add_worker(self) -> None:
        """A worker that has joined."""
        cloud = await self._stack.enter_async_context(played_cloud())
        self._count += 1
        log = self.folder / f"worker-{self._count}.log"
        # In a thread: a process that is spawned, not forked, is waited for for seconds, and the proxy is served here.
        worker = await asyncio.to_thread(
            WorkerProcess, self.model, self.url, log, *WORKER, f"--spot-endpoint={cloud.url}"
        )
        self._stack.callback(worker.kill)
        self.workers.append((worker, cloud))
        await until(lambda: "joined pool" in worker.text() or worker.process.poll() is not None)

    async def replace(self, worker: WorkerProcess) -> None:
        """It has ended, or ends now; another one takes its place."""
        await asyncio.to_thread(worker.kill)
        self.workers = [pair for pair in self.workers if pair[0] is not worker]
        await self.add_worker()

    def scheduler_of(self, worker: WorkerProcess) -> psutil.Process:
        """The process that has its engine."""
        return max(worker.family()[1:], key=lambda it: it.memory_info().rss)

    # --- the trainer -----------------------------------------------------------------------------------------------

    async def start_trainer(self, program: Program, *arguments: Any) -> None:
        self._program = program, arguments
        await self.go_on()

    async def go_on(self) -> None:
        """Start the trainer, or start it again."""
        assert self._program is not None
        program, arguments = self._program
        self._count += 1
        log = self.folder / f"trainer-{self._count}.log"
        start = partial(Forked, program, self.url, str(self.model), str(self.folder), *arguments, log=log)
        self.trainer = await asyncio.to_thread(start)

    async def kill_trainer(self) -> None:
        assert self.trainer is not None
        if self.trainer.poll() is None:
            os.killpg(self.trainer.pid, signal.SIGKILL)
        await asyncio.to_thread(self.trainer.wait, 20)

    @property
    def step(self) -> int:
        """Steps that were taken so far."""
        return max((line["step"] + 1 for line in steps_of(self.folder)), default=0)

    @property
    def over(self) -> bool:
        return (self.folder / END).exists()

    async def reach(self, step: int) -> None:
        """Wait until so many steps were taken. Raises RuntimeError if the trainer ends before."""
        await until(lambda: self.step >= step or self.over or self._failed())

    async def end(self) -> None:
        """Wait for the end of the run."""
        assert self.trainer is not None
        await until(lambda: self._failed() or self.trainer.poll() is not None)

    def _failed(self) -> bool:
        if self.trainer is None or self.trainer.poll() in (None, 0, -signal.SIGKILL):
            return False
        last = sorted(self.folder.glob("trainer-*.log"), key=os.path.getmtime)[-1]
        raise RuntimeError(f"the trainer ended with {self.trainer.poll()}: {last.read_text()[-3000:]}")

    # --- Redis -----------------------------------------------------------------------------------------------------

    def start_redis(self) -> None:
        self.servers = [self._server(), self._server()]
        follow(self.servers[1], self.servers[0])
        self.proxy.targets = [self.servers[0].port]

    def _server(self) -> EmbeddedRedis:
        server = EmbeddedRedis(appendonly=True, config=FAST_SYNC).start()
        self._stack.callback(server.stop)
        return server

    def fail_over(self) -> None:
        """The primary is lost with all that it had; its replica takes its place, and gets one of its own."""
        lost, heir = self.servers
        lost.kill()
        with plain(heir) as client:
            client.replicaof("NO", "ONE")
        other = self._server()
        follow(other, heir)
        self.servers = [heir, other]
        self.proxy.repoint(heir.port)


@asynccontextmanager
async def world(model: Path, folder: Path, workers: int) -> AsyncIterator[World]:
    """A pool that serves."""
    await asyncio.to_thread(folder.mkdir, parents=True)
    async with AsyncExitStack() as stack:
        made = World(model, folder, await stack.enter_async_context(Proxy(0)), stack)
        await asyncio.to_thread(made.start_redis)
        async with asyncio.TaskGroup() as starting:
            for _ in range(workers):
                starting.create_task(made.add_worker())
        try:
            yield made
        finally:
            if made.trainer is not None:
                with contextlib.suppress(ProcessLookupError):
                    await made.kill_trainer()


async def until(condition: Callable[[], Any]) -> None:
    while not condition():  # noqa: ASYNC110 – files and processes are looked at
        await asyncio.sleep(LOOK_S)
