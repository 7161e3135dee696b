"""`python -m benchmarks queue`: the queue alone, compared with other queues on the same Redis in the same run.

benchmarks/README.md says what is measured, and how the others are used.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError, RedisRefused
from rolloutmq.messages.redis import connect, ping
from rolloutmq.ops.cli.options import ids
from rolloutmq.ops.redis import EmbeddedRedis

from ..harness import Run, names, option, turns
from ..peers import Load
from .environments import PEERS, heads, peer_systems
from .growth import Cost, growth
from .turn import System, take_turn

LARGE = 256 << 10
LATENCY_LOAD = 0.1
FEWER = 3
"""Most rounds for latency and for large payloads."""
TASKIQ = ("taskiq_list", "taskiq_stream")
LEVELS: dict[str, tuple[str, str]] = {
    "memory": ("", ""),
    "everysec": ("everysec", ""),
    "always": ("always", ""),
    "disk_everysec": ("everysec", "?durable=disk"),
    "disk": ("always", "?durable=disk"),
}
"""Level of durability -> the server's appendfsync ("" for no append-only file), and the query of the clients' URL."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure."""

    peers: str = option("rq,arq,taskiq", "Measured beside it: some of rq,arq,taskiq; or none.")
    rounds: int = option(5, "Turns of each system; the median counts.", min=1)
    seconds: float = option(5.0, "Length of a turn, after a quarter of it to warm up.", min=0.1, max=3600)
    workers: str = option("1,10,100,1000", "Simulated workers for the growth of Redis' costs.", name="growth-workers")
    lifecycles: int = option(8192, "Jobs measured at each number of workers.", min=16)
    durable: str = option(",".join(LEVELS), f"Levels: some of {','.join(LEVELS)}; or none.")
    journals: bool = option(False, "Also with journals, in turns with turns without: what they cost.")

    @property
    def load(self) -> Load:
        return Load(seconds=self.seconds, warmup_s=self.seconds / 4)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Jobs/s, latency, large payloads and Redis' CPU per job, beside RQ, arq, taskiq and the bare scripts; jobs/s and
    latency at each level of durability."""
    workers = ids("--growth-workers", plan.workers, "numbers such as 1,10,100")
    if min(workers) < 1:
        raise ConfigError(f"--growth-workers {plan.workers!r}: at least 1 each")
    levels = names("--durable", plan.durable, LEVELS, none=True)
    peers = names("--peers", plan.peers, PEERS, none=True)
    systems = [
        System("rolloutmq", sys.executable, f"{__package__}.ours", 2048, 64),
        System("raw", sys.executable, f"{__package__}.raw", 1024, 64),
        *peer_systems(peers, say=run.say),
    ]
    with EmbeddedRedis() as server:
        figures = _throughput(systems, server.url, plan, run)
        figures |= _latency(systems[0], server.url, plan, figures["rolloutmq"], run)
        figures["payload_256k"] = _large(systems, server.url, plan, run)
        figures["journal"] = _journals(systems[0], server.url, plan, run) if plan.journals else None
        costs = asyncio.run(growth(server.url, workers, plan.lifecycles, run.say))
    figures |= _growth_figures(costs)
    figures["durability"] = {level: _at_level(level, systems[0], plan, run) for level in levels}
    return figures | {"peers": {peer: heads(peer) for peer in peers}}


def _rounds(systems: list[System], url: str, load: Load, count: int, run: Run) -> dict[str, list[dict[str, Any]]]:
    """The figures of each system's turns, with jobs per second."""
    found: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
    for number, in_turn in turns(systems, count):
        for system in in_turn:
            if load.payload_bytes >= LARGE:
                turn = replace(load, window=system.window_large)
            else:
                turn = replace(load, window=system.window, poll_s=system.poll_s)
            measured = take_turn(system, url, replace(turn, variant=system.variant))
            found[system.name].append(measured | {"per_s": round(measured["jobs"] / measured["seconds"], 1)})
        run.say(f"round {number + 1}:", ", ".join(f"{name} {its[-1]['per_s']:,.0f}/s" for name, its in found.items()))
    return found


def _rates(systems: list[System], url: str, load: Load, count: int, run: Run) -> dict[str, list[float]]:
    found = _rounds(systems, url, load, count, run)
    return {name: [turn["per_s"] for turn in its] for name, its in found.items()}


def _throughput(systems: list[System], url: str, plan: Plan, run: Run) -> dict[str, Any]:
    rates = _rates(systems, url, plan.load, plan.rounds, run)
    figures: dict[str, Any] = {name: statistics.median(found) for name, found in rates.items()}
    taskiq = max((figures[name] for name in TASKIQ if name in figures), default=None)
    figures = {name: figures.get(name) for name in ("rolloutmq", "rq", "arq")} | {"taskiq": taskiq} | figures
    others = [rate for rate in (figures["arq"], taskiq) if rate is not None]
    ours = figures["rolloutmq"]
    return figures | {
        "ratio_rq": round(ours / figures["rq"], 2) if figures["rq"] else None,
        "ratio_best_peer": round(ours / max(others), 2) if others else None,
        "ratio_raw": round(ours / figures["raw"], 4),
        "rounds": rates,
    }


def _latency(system: System, url: str, plan: Plan, most: float, run: Run) -> dict[str, Any]:
    load = replace(plan.load, seconds=2 * plan.seconds, rate=most * LATENCY_LOAD)
    found = [take_turn(system, url, load) for _ in range(min(plan.rounds, FEWER))]
    figures: dict[str, Any] = {
        name: round(statistics.median(turn[name] for turn in found), 2) for name in ("p50_ms", "p99_ms")
    }
    run.say(f"at {load.rate:,.0f} jobs/s:", **figures)
    rounds = [{name: round(value, 2) for name, value in turn.items()} for turn in found]
    return figures | {"latency": {"jobs_per_s": round(load.rate, 1), "rounds": rounds}}


def _large(systems: list[System], url: str, plan: Plan, run: Run) -> dict[str, Any]:
    rates = _rates(systems, url, replace(plan.load, payload_bytes=LARGE), min(plan.rounds, FEWER), run)
    return {
        name: {
            "per_s": statistics.median(found),
            "mb_per_s": round(statistics.median(found) * LARGE / 1e6, 1),
            "rounds": found,
        }
        for name, found in rates.items()
    }


def _journals(system: System, url: str, plan: Plan, run: Run) -> dict[str, Any]:
    """What journals cost: turns without one, with the client's, and with the client's and the worker's.

    ratio: jobs/s by those of the same round without, the median. client_us: CPU time of the client's process for a job,
    which other processes on the host hardly disturb.
    """
    kinds = [replace(system, name=name, variant=name) for name in ("none", "client", "both")]
    found = _rounds(kinds, url, plan.load, plan.rounds, run)
    rates = {name: [turn["per_s"] for turn in its] for name, its in found.items()}
    spent = {name: [round(turn["client_us"], 1) for turn in its] for name, its in found.items()}
    return {
        "ratio": {
            name: round(statistics.median(one / by for one, by in zip(rates[name], rates["none"], strict=True)), 4)
            for name in ("client", "both")
        },
        "client_us": {name: statistics.median(us) for name, us in spent.items()},
        "rounds": {"per_s": rates, "client_us": spent},
    }


def _at_level(level: str, system: System, plan: Plan, run: Run) -> dict[str, Any] | None:
    """Return rate and latency at one level of durability, or None if this server does not have it.

    The append-only file is on the disk of the current folder.
    """
    appendfsync, query = LEVELS[level]
    config = {"appendfsync": appendfsync} if appendfsync else {}
    run.say(f"durability {level}:")
    with (
        tempfile.TemporaryDirectory(prefix="bench-queue-", dir=Path.cwd()) as folder,
        EmbeddedRedis(directory=folder, appendonly=bool(appendfsync), config=config) as server,
    ):
        url = server.url + query
        if refusal := asyncio.run(_refusal(url)):
            run.say(refusal)
            return None
        rates = _rates([system], url, plan.load, min(plan.rounds, FEWER), run)[system.name]
        rate = statistics.median(rates)
        return {"per_s": rate, "rounds": rates} | _latency(system, url, plan, rate, run)


async def _refusal(url: str) -> str:
    """Return why the server does not support what the URL asks for, "" if it does."""
    async with connect(url) as client:
        try:
            await ping(client)
        except RedisRefused as error:
            return str(error)
    return ""


def _growth_figures(costs: dict[int, Cost]) -> dict[str, Any]:
    by_workers = {str(workers): cost for workers, cost in costs.items()}
    shown = ("redis_us_per_lifecycle", "redis_us_per_heartbeat")
    figures = {name: {workers: cost.pop(name) for workers, cost in by_workers.items()} for name in shown}
    return figures | {"growth": by_workers}
