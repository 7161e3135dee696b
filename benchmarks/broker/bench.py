"""`python -m benchmarks queue`: the queue alone, compared with other queues on the same Redis in the same run.

benchmarks/README.md says what is measured, and how the others are used.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rolloutmq.messages.errors import ConfigError, RedisRefused
from rolloutmq.messages.redis import connect, ping
from rolloutmq.ops.files import check_out
from rolloutmq.ops.redis import EmbeddedRedis

from .. import write_json
from ..peers import Load
from .environments import CACHE, describe_host, peer_systems
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
    """What to measure.

    seconds: length of a turn, after a warm-up of a quarter of it. workers: numbers of workers for the growth of costs.
    lifecycles: measured at each of these. out: file for the result, which is also printed. durable: names of LEVELS.
    journal: measure what journals cost, too.
    """

    peers: list[str] = field(default_factory=list)
    rounds: int = 5
    seconds: float = 5.0
    workers: tuple[int, ...] = (1, 10, 100, 1000)
    lifecycles: int = 8192
    cache: Path = CACHE
    out: Path | None = None
    durable: tuple[str, ...] = ()
    journal: bool = False

    @property
    def load(self) -> Load:
        return Load(seconds=self.seconds, warmup_s=self.seconds / 4)


def run_queue_bench(plan: Plan, *, quiet: bool = False) -> dict[str, Any]:
    """Run it and print the last line. Returns the line's content. Raises ConfigError, InvalidField, BenchFailed."""
    if plan.out is not None:
        check_out("--out", plan.out)
    console = Console(stderr=True, quiet=quiet)

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    systems = [
        System("rolloutmq", sys.executable, f"{__package__}.ours", 2048, 64),
        System("raw", sys.executable, f"{__package__}.raw", 1024, 64),
        *peer_systems(plan.peers, plan.cache, say),
    ]
    with EmbeddedRedis() as server:
        host = describe_host(server.url, plan.peers)
        figures = _throughput(systems, server.url, plan, say)
        figures |= _latency(systems[0], server.url, plan, figures["rolloutmq"], say)
        figures["payload_256k"] = _large(systems, server.url, plan, say)
        figures["journal"] = _journals(systems[0], server.url, plan, say) if plan.journal else None
        costs = asyncio.run(growth(server.url, plan.workers, plan.lifecycles, say))
    figures |= _growth_figures(costs)
    figures["durability"] = {level: _at_level(level, systems[0], plan, say) for level in plan.durable}
    figures["host"] = host
    figures["command"] = " ".join(["rolloutmq", *sys.argv[1:]])
    if plan.out is not None:
        write_json("--out", plan.out, figures)
    print(json.dumps(figures))
    return figures


def _rounds(
    systems: list[System], url: str, load: Load, count: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return jobs per second of each system in each round. Systems take turns, and another one begins each round."""
    rates: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(count):
        start = number % len(systems)
        for system in [*systems[start:], *systems[:start]]:
            if load.payload_bytes >= LARGE:
                turn = replace(load, window=system.window_large)
            else:
                turn = replace(load, window=system.window, poll_s=system.poll_s)
            measured = take_turn(system, url, replace(turn, variant=system.variant))
            rates[system.name].append(round(measured["jobs"] / measured["seconds"], 1))
        say(f"round {number + 1}: " + ", ".join(f"{name} {rate[-1]:,.0f}/s" for name, rate in rates.items()))
    return rates


def _throughput(systems: list[System], url: str, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    rates = _rounds(systems, url, plan.load, plan.rounds, say)
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


def _latency(system: System, url: str, plan: Plan, most: float, say: Callable[[str], None]) -> dict[str, Any]:
    load = replace(plan.load, seconds=2 * plan.seconds, rate=most * LATENCY_LOAD)
    turns = [take_turn(system, url, load) for _ in range(min(plan.rounds, FEWER))]
    names = ("p50_ms", "p99_ms")
    figures: dict[str, Any] = {name: round(statistics.median(turn[name] for turn in turns), 2) for name in names}
    say(f"at {load.rate:,.0f} jobs/s: p50 {figures['p50_ms']} ms, p99 {figures['p99_ms']} ms")
    rounds = [{name: round(value, 2) for name, value in turn.items()} for turn in turns]
    return figures | {"latency": {"jobs_per_s": round(load.rate, 1), "rounds": rounds}}


def _large(systems: list[System], url: str, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    load = replace(plan.load, payload_bytes=LARGE)
    rates = _rounds(systems, url, load, min(plan.rounds, FEWER), say)
    return {
        name: {
            "per_s": statistics.median(found),
            "mb_per_s": round(statistics.median(found) * LARGE / 1e6, 1),
            "rounds": found,
        }
        for name, found in rates.items()
    }


def _journals(system: System, url: str, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """What journals cost: turns without one, with the client's, and with the client's and the worker's.

    ratio: jobs/s by those of the same round without, the median. client_us: CPU time of the client's process for a job,
    which other processes on the host hardly disturb.
    """
    kinds = {"none": "", "client": "client", "both": "both"}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    load = replace(plan.load, window=system.window)
    for number in range(plan.rounds):
        names = list(kinds)
        for name in names[number % 3 :] + names[: number % 3]:
            turn = take_turn(system, url, replace(load, variant=kinds[name]))
            rates[name].append(round(turn["jobs"] / turn["seconds"], 1))
            spent[name].append(round(turn["client_us"], 1))
        told = (f"{name} {rates[name][-1]:,.0f}/s with {spent[name][-1]} us" for name in kinds)
        say(f"journals, round {number + 1}: {', '.join(told)}")
    return {
        "ratio": {
            name: round(statistics.median(one / by for one, by in zip(rates[name], rates["none"], strict=True)), 4)
            for name in ("client", "both")
        },
        "client_us": {name: statistics.median(found) for name, found in spent.items()},
        "rounds": {"per_s": rates, "client_us": spent},
    }


def _at_level(level: str, system: System, plan: Plan, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return rate and latency at one level of durability, or None if this server does not have it.

    The append-only file is on the disk of the current folder.
    """
    appendfsync, query = LEVELS[level]
    config = {"appendfsync": appendfsync} if appendfsync else {}
    say(f"durability {level}:")
    with (
        tempfile.TemporaryDirectory(prefix="bench-queue-", dir=Path.cwd()) as folder,
        EmbeddedRedis(directory=folder, appendonly=bool(appendfsync), config=config) as server,
    ):
        url = server.url + query
        if refusal := asyncio.run(_refusal(url)):
            say(refusal)
            return None
        rates = _rounds([system], url, plan.load, min(plan.rounds, FEWER), say)[system.name]
        rate = statistics.median(rates)
        return {"per_s": rate, "rounds": rates} | _latency(system, url, plan, rate, say)


async def _refusal(url: str) -> str:
    """Return why the server does not support what the URL asks for, "" if it does."""
    async with connect(url) as client:
        try:
            await ping(client)
        except RedisRefused as error:
            return str(error)
    return ""


def parse_levels(text: str) -> tuple[str, ...]:
    """Read names of LEVELS with commas between them, or `none`. Raises ConfigError."""
    names = [] if text.strip() in {"", "none"} else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in LEVELS]:
        raise ConfigError(f"--durable: unknown {', '.join(unknown)}; allowed are {', '.join(LEVELS)}, or none")
    return tuple(names)


def _growth_figures(costs: dict[int, Cost]) -> dict[str, Any]:
    by_workers = {str(workers): asdict(cost) for workers, cost in costs.items()}
    names = ("redis_us_per_lifecycle", "redis_us_per_heartbeat")
    figures = {name: {workers: cost.pop(name) for workers, cost in by_workers.items()} for name in names}
    return figures | {"growth": by_workers}
