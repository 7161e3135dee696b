"""`python -m benchmarks shards`: lifecycles of jobs per second of a pool on one Redis process, and of one on several.

Drivers are processes that each do what clients and workers do, with the real broker and the real leases, in batches:
submit, claim, publish, read and acknowledge. There are as many for each layout. Redis' own CPU time is measured, too:
on a host with few cores the drivers take what the servers would need, and jobs per second of Redis' CPU still tell how
many jobs the busiest server could do.

`main` is a driver: it says when it is ready, begins when it reads a line, and prints what it did.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import redis as sync_redis
from rich.console import Console

from rolloutmq.messages.broker import Broker, Caps, Lease, ShardedLease, broker_of
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.redis import connect, ping
from rolloutmq.ops.files import check_out
from rolloutmq.ops.redis import EmbeddedRedis

from .. import write_json
from ..peers import Load
from .environments import describe_host
from .growth import finished, status
from .ours import job_of

POOL = "shards"
LANES = 8
"""Of each driver; each is a client and a worker."""
BATCH = 64
WINDOW = 256
"""Jobs of a lane that are outstanding, for each shard."""
WARMUP_S = 1.0


@dataclass(frozen=True, slots=True)
class Layout:
    """So many shards on so many servers."""

    shards: int
    servers: int


@dataclass(frozen=True, slots=True)
class ShardsPlan:
    """seconds: length of a turn. rounds: turns of each layout; the median counts. drivers: processes that drive."""

    layouts: tuple[Layout, ...]
    drivers: int
    rounds: int = 3
    seconds: float = 5.0
    out: Path | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """busiest: of all servers the largest share of a core. redis_us: of all servers, per job.

    jobs_per_s_at_a_full_core: what the layout could do when its busiest server has a whole core to itself.
    """

    jobs_per_s: float
    redis_us: float
    busiest: float
    jobs_per_s_at_a_full_core: float


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """Read layouts such as `1x1,4x2`: shards, and servers. Raises ConfigError."""
    found = []
    for one in text.split(","):
        shards, times, servers = one.strip().partition("x")
        if not (times and shards.isdecimal() and servers.isdecimal() and 1 <= int(servers) <= int(shards) <= 64):
            allowed = "SHARDSxSERVERS with commas between them, such as 1x1,4x2; servers at most as many as shards"
            raise ConfigError(f"--layouts {text!r}: {allowed}")
        found.append(Layout(int(shards), int(servers)))
    return tuple(found)


def run_shards_bench(plan: ShardsPlan, *, quiet: bool = False) -> dict[str, Any]:
    """Run it and print the last line; returns its content. Raises ConfigError, BenchFailed."""
    if plan.out is not None:
        check_out("--out", plan.out)
    console = Console(stderr=True, quiet=quiet)
    turns: dict[Layout, list[Turn]] = {layout: [] for layout in plan.layouts}
    for number in range(plan.rounds):
        for layout in plan.layouts:
            turns[layout].append(turn := _turn(layout, plan.drivers, plan.seconds))
            console.print(
                f"round {number + 1}: {layout.shards} shards on {layout.servers} Redis: {turn.jobs_per_s:,.0f} jobs/s, "
                f"busiest server {turn.busiest:.0%} of a core",
                soft_wrap=True, highlight=False,
            )  # fmt: skip
    figures = {f"{layout.shards}x{layout.servers}": _median(found) for layout, found in turns.items()}
    first = next(iter(figures.values()))
    for of in figures.values():
        of["ratio"] = round(of["jobs_per_s"] / first["jobs_per_s"], 2)
        of["ratio_at_a_full_core"] = round(of["jobs_per_s_at_a_full_core"] / first["jobs_per_s_at_a_full_core"], 2)
    with EmbeddedRedis() as server:
        host = describe_host(server.url, [])
    told = {
        "layouts": figures,
        "drivers": plan.drivers,
        "rounds": {f"{it.shards}x{it.servers}": [asdict(turn) for turn in found] for it, found in turns.items()},
        "host": host,
        "command": " ".join(["rolloutmq", *sys.argv[1:]]),
    }
    if plan.out is not None:
        write_json("--out", plan.out, told)
    print(json.dumps(told))
    return told


def default_drivers(layouts: Sequence[Layout]) -> int:
    """As many as there are cores beside the servers of the largest layout."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - max(layout.servers for layout in layouts))


def _median(turns: Sequence[Turn]) -> dict[str, float]:
    names = list(asdict(turns[0]))
    return {name: round(statistics.median(getattr(turn, name) for turn in turns), 3) for name in names}


def _turn(layout: Layout, drivers: int, seconds: float) -> Turn:
    with ExitStack() as stack:
        servers = [stack.enter_context(EmbeddedRedis()) for _ in range(layout.servers)]
        url = ",".join(server.url for server in servers) + (f"?shards={layout.shards}" if layout.shards > 1 else "")
        asyncio.run(_open(url))  # before several do it at the same time
        clients = [stack.enter_context(sync_redis.Redis.from_url(server.url)) for server in servers]
        command = [sys.executable, "-c", f"from {__name__} import main; main()", url, str(seconds)]
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(drivers)
        ]
        try:
            for process in processes:
                _line(process)
            for process in processes:
                _tell(process)
            for process in processes:
                _line(process)  # warm
            used, began = [_cpu_s(client) for client in clients], time.perf_counter()
            rates = [json.loads(_line(process)) for process in processes]
            spent = [_cpu_s(client) - before for client, before in zip(clients, used, strict=True)]
            took = time.perf_counter() - began
        finally:
            for process in processes:
                process.kill()
    rate = sum(done["jobs"] / done["seconds"] for done in rates)
    busiest = max(spent) / took
    return Turn(rate, 1e6 * sum(spent) / (rate * took), busiest, rate / busiest)


async def _open(url: str) -> None:
    async with connect(url, pool=POOL) as client:
        await ping(client)


def _cpu_s(client: Any) -> float:
    said = client.info("cpu")
    return float(said["used_cpu_user"] + said["used_cpu_sys"])


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise SystemExit("a driver ended early")
    return line


def _tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


class _Lane:
    """One client and one worker."""

    def __init__(self, redis: Any, broker: Broker) -> None:
        self._broker, self.done = broker, 0
        name = secrets.token_hex(8)
        self._client, self._load, self._submitted = f"client-{name}", Load(), 0
        clients = redis.shards or (redis,)
        parts = [
            Lease(one, POOL, f"worker-{name}", 600.0, shard=shard, shards=len(clients))
            for shard, one in enumerate(clients)
        ]
        self._lease = parts[0] if len(parts) == 1 else ShardedLease(parts)
        self._places = dict.fromkeys(broker.parts, "0")

    async def begin(self) -> None:
        for part in self._lease.parts:
            await part.join(status(part))
        await self._submit(WINDOW * len(self._lease.parts))

    async def _submit(self, count: int) -> None:
        jobs = []
        for _ in range(count):
            self._submitted += 1
            jobs.append(job_of(self._load.payload(self._submitted)).model_copy(update={"reply_to": self._client}))
        if jobs:
            await self._broker.enqueue(jobs)

    async def _read(self, part: Broker) -> int:
        replies = await part.read_replies(self._client, self._places[part], count=512)
        if replies:
            self._places[part] = replies[-1].entry_id
            await part.ack(self._client, replies)
        return len(replies)

    async def run(self) -> None:
        """Lifecycle after lifecycle, until cancelled. Others may claim the jobs of this lane."""
        while True:
            if claims := await self._lease.claim(BATCH, BATCH, 0):
                await self._lease.complete([finished(claim, self._lease.worker_id) for claim in claims])
            answered = sum(await asyncio.gather(*(self._read(part) for part in self._broker.parts)))
            self.done += answered
            await self._submit(answered)


async def _drive(url: str, seconds: float, say: Callable[[str], None]) -> None:
    async with connect(url, pool=POOL) as redis:
        broker = broker_of(redis, POOL, Caps(jobs=1 << 24, nbytes=1 << 36))
        lanes = [_Lane(redis, broker) for _ in range(LANES)]
        for lane in lanes:
            await lane.begin()
        say("ready")
        sys.stdin.readline()
        running = [asyncio.create_task(lane.run()) for lane in lanes]
        await asyncio.wait(running, timeout=WARMUP_S, return_when=asyncio.FIRST_EXCEPTION)
        say("warm")
        before, began = sum(lane.done for lane in lanes), time.perf_counter()
        await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        figures = {"jobs": sum(lane.done for lane in lanes) - before, "seconds": time.perf_counter() - began}
        for task in running:
            if task.done():
                task.result()  # it ends with an error only
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        say(json.dumps(figures))


def main() -> None:
    """A driver."""
    url, seconds = sys.argv[1:]
    asyncio.run(_drive(url, float(seconds), lambda line: print(line, flush=True)))
