"""`python -m benchmarks shards`: lifecycles of jobs per second of a pool on one Redis process, and of one on several.

Drivers are processes that each do what clients and workers do, with the real broker and the real leases, in batches:
submit, claim, publish, read and acknowledge. There are as many for each layout. Redis' own CPU time is measured, too:
on a host with few cores the drivers take what the servers would need, and jobs per second of Redis' CPU still tell how
many jobs the busiest server could do.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import redis as sync_redis

from rolloutmq.messages.broker import Broker, Caps, Lease, ShardedLease, broker_of
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.redis import connect, ping
from rolloutmq.ops.redis import EmbeddedRedis

from ..harness import Run, option
from ..parts import Part, busy_s
from .growth import finished, status
from .ours import jobs_of

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

    def __str__(self) -> str:
        return f"{self.shards}x{self.servers}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    layouts: str = option("1x1,4x2", "Shards x Redis processes, the first to compare with.")
    drivers: int | None = option(None, "Processes that submit and work. Default: the cores beside Redis.", min=1)
    rounds: int = option(3, "Turns of each layout; the median counts.", min=1)
    seconds: float = option(5.0, "Length of a turn.", min=0.1, max=3600)


Turn = dict[str, float]
"""busiest: of all servers the largest share of a core. redis_us: of all servers, per job.

jobs_per_s_at_a_full_core: what the layout could do when its busiest server has a whole core to itself.
"""


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


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Jobs/s and Redis' CPU of a pool with its shards on one Redis process, and on several."""
    layouts = parse_layouts(plan.layouts)
    drivers = plan.drivers or _default_drivers(layouts)
    found: dict[Layout, list[Turn]] = {layout: [] for layout in layouts}
    for number in range(plan.rounds):
        for layout in layouts:
            found[layout].append(turn := _turn(layout, drivers, plan.seconds))
            run.say(f"round {number + 1}, {layout}: {turn['jobs_per_s']:,.0f} jobs/s,", busiest=turn["busiest"])
    figures = {str(layout): _median(turns) for layout, turns in found.items()}
    first = next(iter(figures.values()))
    for of in figures.values():
        of["ratio"] = round(of["jobs_per_s"] / first["jobs_per_s"], 2)
        of["ratio_at_a_full_core"] = round(of["jobs_per_s_at_a_full_core"] / first["jobs_per_s_at_a_full_core"], 2)
    rounds = {str(layout): turns for layout, turns in found.items()}
    return {"layouts": figures, "drivers": drivers, "rounds": rounds}


def _default_drivers(layouts: Sequence[Layout]) -> int:
    """As many as there are cores beside the servers of the largest layout."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - max(layout.servers for layout in layouts))


def _median(turns: Sequence[Turn]) -> dict[str, float]:
    return {name: round(statistics.median(turn[name] for turn in turns), 3) for name in turns[0]}


def _turn(layout: Layout, drivers: int, seconds: float) -> Turn:
    with ExitStack() as stack:
        servers = [stack.enter_context(EmbeddedRedis()) for _ in range(layout.servers)]
        url = ",".join(server.url for server in servers) + (f"?shards={layout.shards}" if layout.shards > 1 else "")
        asyncio.run(_open(url))  # before several do it at the same time
        clients: list[Any] = [stack.enter_context(sync_redis.Redis.from_url(server.url)) for server in servers]
        parts = [stack.enter_context(Part(drive, url, seconds)) for _ in range(drivers)]
        for part in parts:
            part.line()
        for part in parts:
            part.tell()
        for part in parts:
            part.line()  # warm
        used, began = [busy_s(client.info("cpu")) for client in clients], time.perf_counter()
        rates = [part.answer() for part in parts]
        spent = [busy_s(client.info("cpu")) - before for client, before in zip(clients, used, strict=True)]
        took = time.perf_counter() - began
    rate = sum(done["jobs"] / done["seconds"] for done in rates)
    busiest = max(spent) / took
    redis_us = 1e6 * sum(spent) / (rate * took)
    full = rate / busiest
    return {"jobs_per_s": rate, "redis_us": redis_us, "busiest": busiest, "jobs_per_s_at_a_full_core": full}


async def _open(url: str) -> None:
    async with connect(url, pool=POOL) as client:
        await ping(client)


class _Lane:
    """One client and one worker."""

    def __init__(self, redis: Any, broker: Broker) -> None:
        self._broker, self.done = broker, 0
        name = secrets.token_hex(8)
        self._client, self._submitted = f"client-{name}", 0
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
        if count:
            self._submitted += count
            await self._broker.enqueue(jobs_of(range(self._submitted - count, self._submitted), self._client))

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


def drive(url: str, seconds: float) -> None:
    """A driver: it says when it is ready, begins when it reads a line, and prints what it did."""
    asyncio.run(_drive(url, seconds))


async def _drive(url: str, seconds: float) -> None:
    async with connect(url, pool=POOL) as redis:
        broker = broker_of(redis, POOL, Caps(jobs=1 << 24, nbytes=1 << 36))
        lanes = [_Lane(redis, broker) for _ in range(LANES)]
        for lane in lanes:
            await lane.begin()
        print("ready", flush=True)
        sys.stdin.readline()
        running = [asyncio.create_task(lane.run()) for lane in lanes]
        await asyncio.wait(running, timeout=WARMUP_S, return_when=asyncio.FIRST_EXCEPTION)
        print("warm", flush=True)
        before, began = sum(lane.done for lane in lanes), time.perf_counter()
        await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        figures = {"jobs": sum(lane.done for lane in lanes) - before, "seconds": time.perf_counter() - began}
        for task in running:
            if task.done():
                task.result()  # it ends with an error only
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        print(json.dumps(figures), flush=True)
