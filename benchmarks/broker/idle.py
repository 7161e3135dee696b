"""`python -m benchmarks idle`: what clients that wait and workers without work cost Redis.

Clients are RolloutClients, each waiting for a job that no worker can run yet. Workers are the real worker with an
engine that answers at once. A few processes hold all of them: only Redis' own CPU time (`INFO cpu`) counts. After they
have been idle for a while, Redis is watched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import redis

from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.producer.client import RolloutClient

from .. import crowd
from ..harness import Run, option
from ..parts import Part, busy_s
from .ours import job_of

POOL = "idle"
NEVER = 1 << 30
"""A weights version that nobody publishes."""
IN_ONE_PROCESS = {"workers": 250, "clients": 1250}


@dataclass(frozen=True, slots=True)
class Plan:
    """How many there are, and for how long they are left alone and then watched."""

    clients: int = option(5000, "Clients, each waiting for a job that nobody can run.", name="idle-clients", min=0)
    workers: int = option(1000, "Workers without work.", name="idle-workers", min=0)
    settle_s: float = option(60.0, "Seconds that they are left alone first.", name="settle", min=0.0)
    seconds: float = option(60.0, "Seconds that Redis is watched.", min=1.0)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Redis' share of one core, its connections and its commands a second while many clients and workers are idle.

    Commands include those that scripts give. `redis_cpu_share_alone` is the server's without anybody.
    """
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis())
        admin: Any = stack.enter_context(redis.Redis.from_url(server.url))
        alone, _ = _watch(admin, min(5.0, plan.seconds))
        for count in crowd.shares(plan.workers, IN_ONE_PROCESS["workers"]):
            config = {"redis_url": server.url, "pool": POOL}
            stack.enter_context(Part(crowd.work, count, config, {})).line()
        for number, count in enumerate(crowd.shares(plan.clients, IN_ONE_PROCESS["clients"])):
            stack.enter_context(Part(wait, server.url, number, count)).line()
        run.say(f"{plan.workers} workers and {plan.clients} clients are up")
        time.sleep(plan.settle_s)
        share, commands = _watch(admin, plan.seconds)
        connections = int(admin.info("clients")["connected_clients"])
        maxclients = int(admin.config_get("maxclients")["maxclients"])
    return asdict(plan) | {
        "redis_cpu_share": round(share, 4),
        "redis_cpu_share_alone": round(alone, 4),
        "connections": connections,
        "maxclients": maxclients,
        "commands_per_s": commands,
    }


def _watch(admin: Any, seconds: float) -> tuple[float, dict[str, float]]:
    admin.config_resetstat()
    began, used = time.perf_counter(), busy_s(admin.info("cpu"))
    time.sleep(seconds)
    spent, passed = busy_s(admin.info("cpu")) - used, time.perf_counter() - began
    stats = admin.info("commandstats")
    rates = {name.removeprefix("cmdstat_"): round(one["calls"] / passed, 1) for name, one in stats.items()}
    return spent / passed, {name: rates[name] for name in sorted(rates, key=rates.__getitem__, reverse=True)}


def wait(url: str, process: int, count: int) -> None:
    """A process of so many clients."""

    async def one(number: int, up: Callable[[], None]) -> None:
        async with RolloutClient(url, POOL, client_id=f"idle-{process}-{number}") as client:
            handle = await client.submit(job_of(bytes(64)).model_copy(update={"min_version": NEVER}))
            up()
            await client.wait(handle)

    crowd.run(count, one)
