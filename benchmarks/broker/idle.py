"""`python -m benchmarks idle`: what clients that wait and workers without work cost Redis.

Clients are RolloutClients, each waiting for a job that no worker can run yet. Workers are the real worker with an
engine that answers at once. A few processes hold all of them: only Redis' own CPU time (`INFO cpu`) counts. After they
have been idle for `settle_s`, Redis is watched for `seconds`.

`python -m benchmarks.broker.idle URL clients|workers FIRST COUNT` is one of those processes. It says so when
all of its own are up, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rolloutmq.messages.redis import connect
from rolloutmq.ops.files import check_out
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.producer.client import RolloutClient
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from .. import write_json
from .environments import describe_host
from .ours import job_of

POOL = "idle"
NEVER = 1 << 30
"""A weights version that nobody publishes."""
IN_ONE_PROCESS = {"clients": 1250, "workers": 250}
AT_A_TIME = 32
"""So many of a process start at the same time."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many there are, and for how long they are left alone and then watched."""

    clients: int = 5000
    workers: int = 1000
    settle_s: float = 60.0
    seconds: float = 60.0


def run_idle_bench(crowd: Crowd, *, out: Path | None = None, quiet: bool = False) -> dict[str, Any]:
    """Run it on a Redis of its own and print the last line; returns its content."""
    if out is not None:
        check_out("--out", out)
    console = Console(stderr=True, quiet=quiet)
    with EmbeddedRedis() as server:
        host = describe_host(server.url, [])
        figures = asyncio.run(measure_idle(server.url, crowd, console.print))
    figures |= {"host": host, "command": " ".join(["rolloutmq", *sys.argv[1:]])}
    if out is not None:
        write_json("--out", out, figures)
    print(json.dumps(figures))
    return figures


async def measure_idle(url: str, crowd: Crowd, say: Callable[[str], None]) -> dict[str, Any]:
    """Redis' share of one core, its connections and its commands a second while the crowd is idle.

    Commands include those that scripts give. `redis_cpu_share_alone` is the server's without anybody.
    """
    async with connect(url) as redis:
        admin: Any = redis
        alone, _ = await _watch(admin, min(5.0, crowd.seconds))
        parts: list[Process] = []
        try:
            for kind, count in (("workers", crowd.workers), ("clients", crowd.clients)):
                for first in range(0, count, IN_ONE_PROCESS[kind]):
                    parts.append(await _part(url, kind, first, min(IN_ONE_PROCESS[kind], count - first)))
                say(f"{count} {kind} are up")
            await asyncio.sleep(crowd.settle_s)
            share, commands = await _watch(admin, crowd.seconds)
            server = await admin.info("clients")
            maxclients = int((await admin.config_get("maxclients"))["maxclients"])
            say(f"Redis: {100 * share:.1f}% of a core, {server['connected_clients']} connections of {maxclients}")
        finally:
            for process in parts:
                assert process.stdin is not None
                process.stdin.close()
            await asyncio.gather(*(process.wait() for process in parts))
    return {
        "clients": crowd.clients,
        "workers": crowd.workers,
        "settle_s": crowd.settle_s,
        "seconds": crowd.seconds,
        "redis_cpu_share": round(share, 4),
        "redis_cpu_share_alone": round(alone, 4),
        "connections": int(server["connected_clients"]),
        "maxclients": maxclients,
        "commands_per_s": commands,
    }


async def _watch(admin: Any, seconds: float) -> tuple[float, dict[str, float]]:
    await admin.config_resetstat()
    began, used = time.perf_counter(), await _cpu_s(admin)
    await asyncio.sleep(seconds)
    spent, passed = await _cpu_s(admin) - used, time.perf_counter() - began
    stats = await admin.info("commandstats")
    rates = {name.removeprefix("cmdstat_"): round(one["calls"] / passed, 1) for name, one in stats.items()}
    return spent / passed, {name: rates[name] for name in sorted(rates, key=rates.__getitem__, reverse=True)}


async def _cpu_s(admin: Any) -> float:
    used = await admin.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


async def _part(url: str, kind: str, first: int, count: int) -> Process:
    """A process with some of the crowd, all of which are up."""
    command = [sys.executable, "-m", __name__, url, kind, str(first), str(count)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise SystemExit(f"{count} {kind} did not start")
    return process


async def _one_client(url: str, number: int, up: Callable[[], None]) -> None:
    async with RolloutClient(url, POOL, client_id=f"idle-{number}") as client:
        handle = await client.submit(job_of(bytes(64)).model_copy(update={"min_version": NEVER}))
        up()
        await client.wait(handle)


async def _one_worker(url: str, _number: int, up: Callable[[], None]) -> None:
    worker = Worker(WorkerConfig(redis_url=url, pool=POOL), ScriptedEngine(echo=True), NoTokenizer())
    serving = asyncio.create_task(worker.run())
    joined = asyncio.create_task(worker.joined.wait())
    await asyncio.wait({serving, joined}, return_when=asyncio.FIRST_COMPLETED)
    if joined.done():
        up()
    await serving


KINDS: dict[str, Callable[[str, int, Callable[[], None]], Awaitable[None]]] = {
    "clients": _one_client,
    "workers": _one_worker,
}


async def _be_idle(url: str, kind: str, first: int, count: int) -> None:
    ended, starting = asyncio.Event(), asyncio.Semaphore(AT_A_TIME)
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)

    async def one(number: int, up: asyncio.Event) -> None:
        async with starting:
            task = asyncio.ensure_future(KINDS[kind](url, number, up.set))
            running.append(task)
            started: list[asyncio.Future[Any]] = [task, asyncio.ensure_future(up.wait())]
            await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()

    running: list[asyncio.Future[None]] = []
    await asyncio.gather(*(one(number, asyncio.Event()) for number in range(first, first + count)))
    print("up", flush=True)
    await ended.wait()


if __name__ == "__main__":
    url, kind, first, count = sys.argv[1:]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_be_idle(url, kind, int(first), int(count)))
