"""What it costs to be watched: a benchmark's metrics and traces, switched on and off between its turns."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import psutil

from rolloutmq.worker.metrics import MetricsServer, Vitals, worker_families

from .traces import traces_on

if TYPE_CHECKING:
    from prometheus_client import Metric

SCRAPE_S = 5.0
"""Between two scrapes of the worker."""


class Watching:
    """Turns with metrics, with traces and without, and the CPU time that each of them took."""

    SIDES = ("metrics", "traces")

    def __init__(self, vitals: Vitals, redis_pid: int, exporter: asyncio.subprocess.Process) -> None:
        self._vitals, self._exporter = vitals, exporter
        self._named = {redis_pid: "redis", exporter.pid: "exporter"}
        self._turns: dict[str, list[dict[str, float]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, side: str) -> AsyncIterator[dict[str, float]]:
        """Measure what is done in the block. It yields CPU seconds by process; the block adds the client's."""
        spent: dict[str, float] = {}
        before = self._cpu_seconds()
        async with contextlib.AsyncExitStack() as stack:
            if side == "metrics":
                await stack.enter_async_context(self._metrics())
            elif side == "traces":
                stack.enter_context(traces_on())
            yield spent
        spent |= {name: seconds - before[name] for name, seconds in self._cpu_seconds().items()}
        self._turns.setdefault(side, []).append(spent)

    @contextlib.asynccontextmanager
    async def _metrics(self) -> AsyncIterator[None]:
        """The worker serves its metrics and is scraped every SCRAPE_S seconds, the first time at once, and the
        exporter runs. The scraper is a thread of this process, so what it costs counts, too."""

        def collect() -> Iterable[Metric]:
            return worker_families(self._vitals, time.monotonic())

        with MetricsServer("127.0.0.1", 0, collect) as server:
            scraping = asyncio.create_task(_scrape(f"http://127.0.0.1:{server.port}/metrics"))
            self._exporter.send_signal(signal.SIGCONT)
            try:
                yield
            finally:
                self._exporter.send_signal(signal.SIGSTOP)
                scraping.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await scraping

    def _cpu_seconds(self) -> dict[str, float]:
        """By process, so far. The worker is this process; children without a name are the engine's."""
        found = {"worker": time.process_time(), "engine": 0.0} | dict.fromkeys(self._named.values(), 0.0)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = child.cpu_times()
                found[self._named.get(child.pid, "engine")] += times.user + times.system
        return found

    def figures(self, jobs: int) -> dict[str, Any]:
        """What turns of `jobs` jobs cost.

        cpu_us_per_job: means, by side and process. added_cpu: what a side adds, as a share of all CPU time of the
        pool's turns. What the engine adds is left out: metrics and traces do nothing in its processes, and its turns
        differ by more than they cost.
        """
        mean = {
            side: {name: sum(one[name] for one in found) / len(found) / jobs * 1e6 for name in found[0]}
            for side, found in self._turns.items()
        }
        beside = {side: sum(us for name, us in found.items() if name != "engine") for side, found in mean.items()}
        whole = sum(mean["pool"].values())
        return {
            "cpu_us_per_job": {side: {name: round(us) for name, us in found.items()} for side, found in mean.items()},
            "added_cpu": {side: round((beside[side] - beside["pool"]) / whole, 4) for side in self.SIDES},
        }


@contextlib.asynccontextmanager
async def watching(vitals: Vitals, redis_url: str, pool: str, redis_pid: int) -> AsyncIterator[Watching]:
    """With a `rolloutmq exporter` in a process of its own, which is stopped while it is not needed.

    Raises RuntimeError if it does not start.
    """
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "exporter", "--pool", pool, "--redis", redis_url]
    command += ["--host", "127.0.0.1", "--port", "0"]
    exporter = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert exporter.stderr is not None
        if not await exporter.stderr.readline():  # it says its port
            raise RuntimeError(f"the exporter ended with {await exporter.wait()}")
        exporter.send_signal(signal.SIGSTOP)
        yield Watching(vitals, redis_pid, exporter)
    finally:
        with contextlib.suppress(ProcessLookupError):
            exporter.kill()
        await exporter.wait()


async def _scrape(url: str) -> None:
    while True:
        await asyncio.to_thread(_get, url)
        await asyncio.sleep(SCRAPE_S)


def _get(url: str) -> None:
    with urlopen(url, timeout=10) as answer:
        answer.read()
