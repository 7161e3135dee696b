"""`python -m benchmarks scale`: runs, and what they print."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rolloutmq.messages.redis import connect
from rolloutmq.ops.files import check_out
from rolloutmq.ops.redis import EmbeddedRedis

from .. import write_json
from ..broker.environments import describe_host
from ..broker.turn import BenchFailed
from .deaths import Deaths, measure_deaths
from .scenario import Scenario
from .simulation import Simulation

PARTIALS: dict[str, tuple[bool, ...]] = {"both": (True, False), "on": (True,), "off": (False,)}
BEATS_PER_S = 667.0
"""Heartbeats a second of 1,000 real workers: a crowd sends fewer, see worker/lease/heartbeat.py."""
ENOUGH_BEATS = 1000
"""From so many heartbeats on, what one costs is told."""
SIMULATED = (
    "Engines are rates: nothing is generated, and a token in Redis stands for a block of tokens.",
    "The clock is simulated and stands still while Redis answers: no queue second is this host's.",
    "Leases end by the simulated clock. Real heartbeats are sent every 15 real seconds, not every second or two.",
    "Of checkpoints only the last one before each death is written.",
    "Prefills cost nothing, also those of samples that are continued.",
    "The turn of a job that runs alone, after the deaths of its workers, is by Redis' clock.",
)


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """What to run. partials: "on", "off", or "both" one after the other. deaths: instead of a simulation."""

    scenario: Scenario = field(default_factory=Scenario)
    seed: int = 0
    partials: str = "both"
    deaths: Deaths | None = None
    out: Path | None = None


def run_scale_bench(plan: ScalePlan, *, quiet: bool = False) -> dict[str, Any]:
    """Run it on a Redis of its own and print the last line; returns its content.

    Raises BenchFailed if a job was lost, a result came twice or with other tokens than its sample has.
    """
    if plan.out is not None:
        check_out("--out", plan.out)
    console = Console(stderr=True, quiet=quiet)

    def say(told: str) -> None:
        console.print(told, soft_wrap=True, highlight=False)

    with EmbeddedRedis() as server:
        host = describe_host(server.url, [])
        if plan.deaths is not None:
            figures: dict[str, Any] = {"deaths": asyncio.run(measure_deaths(server.url, plan.deaths, say))}
        else:
            figures = {"scenario": plan.scenario.model_dump(), "seed": plan.seed, "simulated": SIMULATED}
            for partials in PARTIALS[plan.partials]:
                found = asyncio.run(simulate(server.url, plan.scenario, plan.seed, partials, say))
                figures["with_partials" if partials else "without_partials"] = found
    figures |= {"host": host, "command": " ".join(["rolloutmq", *sys.argv[1:]])}
    if plan.out is not None:
        write_json("--out", plan.out, figures)
    print(json.dumps(figures))
    return figures


async def simulate(
    url: str, scenario: Scenario, seed: int, partials: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """One run on the emptied Redis at `url`. Raises BenchFailed."""
    async with connect(url) as redis:
        await redis.flushall()
        run = Simulation(redis, scenario, seed, partials=partials)
        await run.watch.begin()
        began = time.monotonic()
        await run.run()
        real_s = time.monotonic() - began
        figures = await _figures(run, real_s)
    waits, hours = figures["queue_s"], figures["gpu_hours"]
    say(
        f"{'with' if partials else 'without'} partials: {run.now / 3600:.1f} h in {real_s:.0f} s, "
        f"{figures['samples']} samples, {figures['tokens']['wasted_share']:.2%} of tokens wasted, "
        f"queue p50 {waits.get('p50', 0.0)} s, p95 {waits.get('p95', 0.0)} s, GPU hours {hours}"
    )
    oracle = run.oracle
    if oracle.open or oracle.twice or oracle.wrong:
        raise BenchFailed(
            f"{len(oracle.open)} jobs have no outcome, {oracle.twice} results came twice, {oracle.wrong} were wrong"
        )
    return figures


async def _figures(run: Simulation, real_s: float) -> dict[str, Any]:
    oracle, block = run.oracle, run.scenario.block
    cpu_s = await run.watch.spent_s()
    sample_us = 1e6 * (cpu_s - run.beat_cpu_s) / max(1, oracle.samples)
    beat_us = round(1e6 * run.beat_cpu_s / run.beats, 1) if run.beats >= ENOUGH_BEATS else None
    return {
        "simulated_s": round(run.now, 1),
        "real_s": round(real_s, 1),
        "simulated_per_real_s": round(run.now / real_s, 1),
        "jobs": len(oracle.lengths),
        "samples": oracle.samples,
        "lost_jobs": len(oracle.open),
        "results_twice": oracle.twice,
        "results_wrong": oracle.wrong,
        "failed_jobs": oracle.failed,
        "tokens": {
            "generated": oracle.generated * block,
            "delivered": oracle.delivered * block,
            "wasted": oracle.wasted * block,
            "wasted_share": round(oracle.wasted / max(1, oracle.generated), 5),
        },
        **run.timeline.figures(run.scenario.slots),
        "workers": {"joined": run.joined, **run.counts},
        "policy": dict(run.scaler.states),
        "redis": {
            "cpu_s": round(cpu_s, 2),
            "cpu_share_of_real_time": round(cpu_s / real_s, 4),
            "cpu_us_per_sample": round(sample_us, 1),
            "heartbeats": run.beats,
            "cpu_us_per_heartbeat": beat_us,
            "cpu_share_of_simulated_time_without_heartbeats": round((cpu_s - run.beat_cpu_s) / run.now, 6),
            "cpu_share_of_heartbeats_of_1000_workers": beat_us and round(beat_us * BEATS_PER_S / 1e6, 4),
            **await run.watch.figures(),
        },
        "timeline": run.timeline.rows,
    }
