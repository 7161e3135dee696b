"""Is work spread? The real broker with simulated engines, beside an ideal balancer.

    python -m benchmarks spread --out benchmarks/results/spread-cpu.json       # make bench-spread, about 15 minutes
    python -m benchmarks spread --fast                                         # a minute

Each case (load.py) runs in a process of its own on a private redis-server (pool.py), its client in another one
(client.py). Time is stretched: the case says by how much, and it runs again with more if Redis or the harness took
more than half a core. Measured are simulated seconds until the last sample has ended, as a multiple of the time of a
balancer without latency that knows no lengths: it keeps loads even and moves samples at no cost (ideal.py). Of several
runs of a case, each with its own lengths, the one with the median ratio counts.

What has to be: a makespan of at most 1.10 times the ideal one. Loads, when all of a batch that came at once is
claimed, within 1.25 of each other, or one job. Workers that die hold at most 1.25 times as many samples as the ideal's.
What a job costs Redis is in `python -m benchmarks queue`.

The scripts' own waits (a quarter of a second until a share lapses, and the like) are real time. So they weigh less when
time is stretched.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from ..harness import Run, option
from ..parts import Part
from .ideal import Ideal
from .load import CURVES, MEASURED, MEDIAN, MOST, PROMPT, ROOM, SIGMA, Case, Lost
from .pool import run_case

SHARE, TRIES = 0.5, 3
MOST_RATIO, MOST_UNEVEN = 1.10, 1.25
REMARKS = [
    "The scripts' waits (250 ms until a share lapses, and others) are real time; they weigh less if time is stretched.",
    "Prefills: a step of an empty engine for so many tokens; of a prompt once for a job, of what was generated when a "
    "sample goes on elsewhere. The ideal pays for what leaving workers give back, and not for its moves.",
    "The ideal loses the samples that the run lost. It notices that after silent_s, the earliest end of a lease.",
]

FAST = [Case(2, 64), Case(8, 64, n=8), Case(8, 512)]
CASES = [
    Case(2, 2),
    Case(2, 64, n=8),
    Case(2, 512),
    Case(8, 8),
    Case(8, 64, n=8),
    Case(8, 512),
    Case(8, 512, curve="0.6b"),
    Case(8, 512, curve="8b"),
    Case(8, 2048, n=8),
    Case(8, 512, n=8, arrival="waves"),
    Case(8, 512, arrival="one"),
    Case(8, 1024, churn=True, stretch=2, runs=5),
    Case(64, 64),
    Case(64, 1024, n=8),
    Case(64, 4096, stretch=2),
    Case(64, 4096, n=8, arrival="waves"),
    Case(64, 1024, arrival="one"),
    Case(64, 4096, churn=True, stretch=3, runs=5),
    Case(512, 512, stretch=2),
    Case(512, 4096, n=8, stretch=3),
    Case(512, 16384, stretch=6),
    Case(512, 16384, n=8, arrival="waves", stretch=4),
]


def figures_of(case: Case) -> dict[str, Any]:
    """Run a case until it was not too fast for this host."""
    for _ in range(TRIES):
        figures: dict[str, Any] = {"seed": case.seed, "stretch": case.stretch, "host_load": os.getloadavg()[0]}
        with Part(run_case, dataclasses.asdict(case)) as process:
            figures |= process.answer()
        over = max(figures["redis_share"], figures["harness_share"]) / SHARE
        if over < 1:
            break
        case = dataclasses.replace(case, stretch=round(1.2 * over * case.stretch, 1))
    lost = [Lost(*one) for one in figures.pop("lost")]
    ideal = Ideal(case, lost, figures["silent_s"])
    ideal_s = ideal.makespan()
    figures |= {"ideal_s": round(ideal_s, 3), "ratio": round(figures["makespan_s"] / ideal_s, 3)}
    return figures | {"lost": len(lost), "lost_if_even": ideal.held}


def median_of(case: Case) -> dict[str, Any]:
    """The run with the median ratio, and the ratios of all."""
    runs = [figures_of(dataclasses.replace(case, seed=case.seed + i)) for i in range(case.runs)]
    ratios = [one["ratio"] for one in runs]
    return sorted(runs, key=lambda one: one["ratio"])[len(runs) // 2] | {"ratios": ratios}


def even(case: Case, figures: dict[str, Any]) -> bool:
    """Whether loads at claim, and of those that died, are as even as they have to be."""
    if case.churn:
        return figures["lost"] <= MOST_UNEVEN * figures["lost_if_even"]
    if case.arrival != "once":
        return True
    least, most = figures["loads"]
    return most <= MOST_UNEVEN * least or most - least <= case.n


SHOWN = "ratio", "loads", "stretch", "redis_share", "harness_share", "moves", "jobs_per_claim", "redis_us_per_job"


def measured(case: Case, run: Run) -> dict[str, Any]:
    """A case beside the ideal."""
    row: dict[str, Any] = dataclasses.asdict(case)
    del row["stretch"], row["seed"]
    row["now"] = median_of(case)
    run.say(f"{case.name}:", **{name: row["now"][name] for name in SHOWN})
    return row | {"even": even(case, row["now"])}


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as it has to be."""
    names = {field.name for field in dataclasses.fields(Case)}
    found = []
    for row in rows:
        name, now = Case(**{key: value for key, value in row.items() if key in names}).name, row["now"]
        if now["ratio"] > MOST_RATIO:
            found.append(f"{name}: makespan {now['ratio']}")
        if not row["even"]:
            found.append(f"{name}: loads {now['loads']}, {now['lost']} lost, {now['lost_if_even']} if even")
        if max(now["redis_share"], now["harness_share"]) >= SHARE:
            found.append(f"{name}: too fast for this host")
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    workers: list[int] = option([], "Only cases with so many; may be repeated.")
    fast: bool = option(False, "A few small cases.")
    seed: int = option(1, "Of the lengths.")


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """How evenly work is spread: makespans on the real broker with simulated engines, as multiples of an ideal one."""
    cases = [case for case in (FAST if plan.fast else CASES) if case.workers in (plan.workers or [case.workers])]
    found: dict[str, Any] = {"seed": plan.seed, "remarks": REMARKS, "cases": []}
    found |= {
        "curves": CURVES,
        "measured": MEASURED,
        "tokens": {"median": MEDIAN, "sigma": SIGMA, "most": MOST, "prompt": PROMPT},
        "room": ROOM,
    }
    for case in cases:
        found["cases"].append(measured(dataclasses.replace(case, seed=plan.seed), run))
        run.keep(found)
    found["missed"] = missed(found["cases"])
    run.say("not as it has to be:", found["missed"])
    return found
