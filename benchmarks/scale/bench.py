"""`python -m benchmarks scale`: runs, and what they print."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.redis import connect
from rolloutmq.ops.redis import EmbeddedRedis

from ..harness import Run, option
from ..parts import BenchFailed
from .deaths import Deaths, measure_deaths
from .scenario import Scenario, read_scenario
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
class Plan:
    """What to run: a scenario, or deaths in real time."""

    scenario: Path | None = option(
        None, "TOML, YAML or JSON file with what is simulated. Default: a day.", argument=True
    )
    minutes: float | None = option(None, "Simulated minutes of load, in place of the file's.")
    workers: int | None = option(None, "Most workers, in place of the file's. With --kill: all.")
    seed: int = option(0, "The same seed draws the same load.")
    partials: str = option("both", "Unfinished samples are continued: on, off, or both one after the other.")
    kill: int | None = option(None, "Instead, in real time: so many of 500 real workers die at once.")
    lease: float = option(10.0, "Lease of these workers in seconds.", min=0.2, max=3600)


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """A fleet of simulated engines on a real broker: queue seconds, GPU hours, wasted tokens and Redis' CPU.

    Raises BenchFailed if a job was lost, a result came twice or with other tokens than its sample has.
    """
    if plan.partials not in PARTIALS:
        raise ConfigError(f"--partials {plan.partials!r}: on, off or both")
    given = {"minutes": plan.minutes, "max_workers": plan.workers if plan.kill is None else None}
    scenario = read_scenario(plan.scenario, **{name: value for name, value in given.items() if value is not None})
    with EmbeddedRedis() as server:
        if plan.kill is not None:
            deaths = Deaths(500 if plan.workers is None else plan.workers, plan.kill, plan.lease, 6 * plan.lease)
            return {"deaths": asyncio.run(measure_deaths(server.url, deaths, run.say))}
        figures: dict[str, Any] = {"scenario": scenario.model_dump(), "seed": plan.seed, "simulated": SIMULATED}
        for partials in PARTIALS[plan.partials]:
            found = asyncio.run(simulate(server.url, scenario, plan.seed, partials, run.say))
            figures["with_partials" if partials else "without_partials"] = found
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
    }
