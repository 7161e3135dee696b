"""`python -m benchmarks page`: what the dashboard of a large pool costs its server, Redis and a browser.

Workers are statuses that another process writes as often as real ones would, all of them busy; jobs wait behind them.
Redis is watched without the dashboard first. The browser is Debian's Chromium, headless, on the same host.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import quantiles
from typing import Any

import psutil
import redis

from rolloutmq.messages import Broker, GenerateJob, Lease, SamplingParams, connect
from rolloutmq.messages.codec import encode
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model import WorkerStatus
from rolloutmq.messages.redis import Keys
from rolloutmq.ops.redis import EmbeddedRedis

from .harness import Run, option
from .parts import busy_s

POOL = "page"
BATCH = 1000
HEARTBEATS_PER_S = 500
"""As 1,000 workers send them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How large the pool is, and for how long it is watched."""

    workers: int = option(1000, "Workers.", name="page-workers", min=1)
    jobs: int = option(100_000, "Jobs that wait.", min=0)
    pages: int = option(4, "Browsers' pages, all of which are open.", min=1)
    seconds: float = option(60.0, "Seconds that everything is watched.", min=5.0)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """The server's and Redis' shares of a core, and a browser's milliseconds to the first paint and for an update."""
    with EmbeddedRedis() as server:
        asyncio.run(_fill(server.url, plan))
        run.say(f"{plan.workers} workers and {plan.jobs} jobs are in the pool")
        beats = multiprocessing.Process(target=beat, args=(server.url, plan.workers), daemon=True)
        beats.start()
        admin: Any = redis.Redis.from_url(server.url)
        alone = _share(admin, plan.seconds / 2)
        try:
            with _dashboard(server.url) as (process, url), _pages(url, plan.pages) as pages:
                time.sleep(5)
                began, used = time.perf_counter(), sum(process.cpu_times()[:2])
                share = _share(admin, plan.seconds)
                spent = sum(process.cpu_times()[:2]) - used
                passed = time.perf_counter() - began
                taken = [_timings(page) for page in pages]
        finally:
            beats.terminate()
    return asdict(plan) | {
        "server_cpu_share": round(spent / passed, 4),
        "redis_cpu_share": round(share - alone, 4),
        "redis_cpu_share_alone": round(alone, 4),
        "first_paint_ms": [one["first_paint_ms"] for one in taken],
        "update_ms": taken[0]["update_ms"],
    }


async def _fill(url: str, plan: Plan) -> None:
    async with connect(url, pool=POOL) as db:
        for number in range(plan.workers):
            status = status_of(number)
            await Lease(db, POOL, status.worker_id, 3600.0).join(status)
        broker, sampling = Broker(db, POOL), SamplingParams(max_new_tokens=16)
        for start in range(0, plan.jobs, BATCH):
            count = min(BATCH, plan.jobs - start)
            await broker.enqueue(
                [GenerateJob(token_ids=[1], sampling=sampling, reply_to="bench") for _ in range(count)]
            )


def status_of(number: int) -> WorkerStatus:
    """A busy worker's, with other figures each time."""
    return WorkerStatus(
        worker_id=f"host-{number // 8:03d}-{number}-{number:08x}", host=f"host-{number // 8:03d}", pid=number + 1,
        state="serving", version=7, model="Qwen/Qwen3-8B", engine="sglang 0.5.23", device="NVIDIA H100", max_running=64,
        running=random.randint(60, 64), held=64, generated_tokens=int(time.time() * 1000),
        tokens_per_s=random.uniform(1000, 2000), finished_samples=int(time.time()), staleness=(1, 2, 3, 4, 5, 6, 7),
    )  # fmt: skip


def beat(url: str, workers: int) -> None:
    """A process that writes statuses, in turns."""
    client, keys, number = redis.Redis.from_url(url), Keys(POOL), 0
    while True:
        began = time.monotonic()
        pipe = client.pipeline(transaction=False)
        for _ in range(min(workers, HEARTBEATS_PER_S)):
            status, number = status_of(number % workers), number + 1
            pipe.hset(keys.worker(status.worker_id), "status", encode(status))
        pipe.execute()
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


def _share(admin: Any, seconds: float) -> float:
    """Redis' share of a core."""
    began, used = time.perf_counter(), busy_s(admin.info("cpu"))
    time.sleep(seconds)
    return (busy_s(admin.info("cpu")) - used) / (time.perf_counter() - began)


@contextlib.contextmanager
def _dashboard(url: str) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-c", "from rolloutmq.ops.entry import main; main()", "dashboard", "--redis", url]
    command += ["--pool", POOL, "--port", "0", "--json", "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield psutil.Process(process.pid), json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


@contextlib.contextmanager
def _pages(url: str, count: int) -> Iterator[list[Any]]:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        raise ConfigError("the benchmark needs a browser: Debian's package chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        pages = [browser.new_page() for _ in range(count)]
        for page in pages:
            page.goto(url)
            page.locator("#verdict-state:not(:empty)").wait_for()
        yield pages
        browser.close()


def _timings(page: Any) -> dict[str, Any]:
    """What the page itself has measured."""
    first, taken = page.evaluate(
        """() => ["first-paint", "update"].map((name) =>
             performance.getEntriesByName(name, "measure").map((it) => it.duration))"""
    )
    parts = quantiles(taken[1:], n=20, method="inclusive")
    update = {"p50": round(parts[9], 1), "p95": round(parts[18], 1), "most": round(max(taken[1:]), 1)}
    return {"first_paint_ms": round(first[0], 1), "update_ms": update}
