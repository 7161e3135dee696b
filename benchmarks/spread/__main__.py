"""Is work spread? The real broker with simulated engines, beside an ideal balancer and beside an earlier commit.

    python -m benchmarks.spread --out benchmarks/results/spread-cpu.json       # make bench-spread, about 25 minutes
    python -m benchmarks.spread --fast                                         # a minute
    python -m benchmarks.spread --only cost                                    # what a job costs Redis

Each case (load.py) runs in a process of its own on a private redis-server (pool.py), its client in another one
(client.py). Time is stretched: the case says by how much, and it runs again with more if Redis or the harness took
more than half a core. Measured are simulated seconds until the last sample has ended, as a multiple of the time of a
balancer without latency that knows no lengths: it keeps loads even and moves samples at no cost (ideal.py). Of several
runs of a case, each with its own lengths, the one with the median ratio counts.

What has to be: a makespan of at most 1.10 times the ideal one. Loads, when all of a batch that came at once is
claimed, within 1.25 of each other, or one job. Workers that die hold at most 1.25 times as many samples as the ideal's.
Redis' processor time for a job at equal jobs per claim at most 1.05 times that of the earlier commit (cost.py).

The scripts' own waits (a quarter of a second until a share lapses, and the like) are real time. So they weigh less when
time is stretched.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rolloutmq.ops.redis import EmbeddedRedis

from ..broker.environments import describe_host
from .ideal import Ideal
from .load import CURVES, MEASURED, MEDIAN, MOST, PROMPT, ROOM, SIGMA, Case, Lost

BEFORE = "80afd48"
SHARE, TRIES = 0.5, 3
MOST_RATIO, MOST_UNEVEN, MOST_COST = 1.10, 1.25, 1.05
CASE_S = 900
COST_PROCESSES, COST_ROUNDS, COST_BATCHES = 8, 8, 4
EACH = (1, 8, 64)
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


def exported(commit: str, folder: str) -> str:
    """The package of a commit, in a folder for PYTHONPATH."""
    place = Path(folder) / "rolloutmq"
    place.mkdir()
    archive = subprocess.run(["git", "archive", commit], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    if not (place / "__init__.py").exists():
        raise SystemExit(f"{commit} has no package")
    return folder


def environment(path: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)


def measure(case: Case, path: str) -> dict[str, Any]:
    """Run a case until it was not too fast for this host."""
    for _ in range(TRIES):
        command, env = [sys.executable, "-m", "benchmarks.spread.pool", case.to_json()], environment(path)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=CASE_S, check=False)
        if done.returncode:
            raise SystemExit(f"{case.name}: {done.stderr[-4000:]}")
        figures: dict[str, Any] = {"seed": case.seed, "stretch": case.stretch, "host_load": os.getloadavg()[0]}
        figures |= json.loads(done.stdout.splitlines()[-1])
        over = max(figures["redis_share"], figures["harness_share"]) / SHARE
        if over < 1:
            break
        case = dataclasses.replace(case, stretch=round(1.2 * over * case.stretch, 1))
    lost = [Lost(*one) for one in figures.pop("lost")]
    ideal = Ideal(case, lost, figures["silent_s"])
    ideal_s = ideal.makespan()
    figures |= {"ideal_s": round(ideal_s, 3), "ratio": round(figures["makespan_s"] / ideal_s, 3)}
    return figures | {"lost": len(lost), "lost_if_even": ideal.held}


def median_of(case: Case, path: str) -> dict[str, Any]:
    """The run with the median ratio, and the ratios of all."""
    runs = [measure(dataclasses.replace(case, seed=case.seed + i), path) for i in range(case.runs)]
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


def compare(case: Case, before: str) -> dict[str, Any]:
    """A case now and before, beside the ideal."""
    row: dict[str, Any] = dataclasses.asdict(case)
    del row["stretch"], row["seed"]
    for side, path in (("now", ""), ("before", before)):
        figures = row[side] = median_of(case, path)
        say(case.name if side == "now" else "", side, figures)
    row["even"] = even(case, row["now"])
    return row


COLUMNS = "ratio", "loads", "stretch", "redis_share", "harness_share", "moves", "jobs_per_claim", "redis_us_per_job"


def say(name: str, side: str, figures: dict[str, Any]) -> None:
    """A line of the table."""
    loads = "{}..{}".format(*figures["loads"]) if figures["loads"] else ""
    cells = [str(cell) for cell in ({**figures, "loads": loads}[column] for column in COLUMNS)]
    widths = map(len, COLUMNS)
    print(f"{name:50} {side:6}", *(f"{cell:>{max(9, w)}}" for cell, w in zip(cells, widths, strict=True)), flush=True)


class Side:
    """One commit's Redis, on which jobs are run when it is asked to."""

    def __init__(self, path: str) -> None:
        command = [sys.executable, "-m", "benchmarks.spread.cost"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment(path), stdin=pipe, stdout=pipe, text=True)
        self._line()

    def _line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise SystemExit("the measurement of costs failed")
        return line

    def us(self, each: int) -> float:
        """µs of Redis for a job."""
        assert self._process.stdin
        self._process.stdin.write(f"{each} {COST_BATCHES}\n")
        self._process.stdin.flush()
        return float(self._line())

    def end(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def costs(before: str) -> list[dict[str, Any]]:
    """µs of Redis for a job at equal jobs per claim, now and before, in turns.

    Two servers with the same code differ by some percent, for as long as they run; so the mean of several counts.
    """
    found: dict[int, list[tuple[float, float]]] = {each: [] for each in EACH}
    for _ in range(COST_PROCESSES):
        sides = Side(""), Side(before)
        for each in EACH:
            took: dict[Side, list[float]] = {side: [] for side in sides}
            for number in range(1 + COST_ROUNDS):
                for side in sides if number % 2 else reversed(sides):
                    took[side].append(side.us(each))
            now, then = (statistics.median(took[side][1:]) for side in sides)  # the first warms up
            found[each].append((now, then))
        for side in sides:
            side.end()
    rows = []
    for each, pairs in found.items():
        now, then = (statistics.mean(side) for side in zip(*pairs, strict=True))
        row = {
            "jobs_per_claim": each,
            "now_us": round(now, 1),
            "before_us": round(then, 1),
            "ratio": round(now / then, 3),
            "of_pairs": sorted(round(a / b, 3) for a, b in pairs),
            "rounds": COST_ROUNDS,
        }
        rows.append(row)
        print(
            f"{each} jobs per claim: {now:.1f} µs of Redis for a job, before {then:.1f}, ratio {now / then:.3f}",
            flush=True,
        )
    return rows


def missed(rows: list[dict[str, Any]], cost: list[dict[str, Any]]) -> list[str]:
    """What is not as it has to be."""
    names = {field.name for field in dataclasses.fields(Case)}
    found = []
    for row in rows:
        name, now = Case(**{key: value for key, value in row.items() if key in names}).name, row["now"]
        if now["ratio"] > MOST_RATIO:
            found.append(f"{name}: makespan {now['ratio']}")
        if not row["even"]:
            found.append(f"{name}: loads {now['loads']}, {now['lost']} lost, {now['lost_if_even']} if even")
        if max(row[side][share] for side in ("now", "before") for share in ("redis_share", "harness_share")) >= SHARE:
            found.append(f"{name}: too fast for this host")
    dear = [one for one in cost if one["ratio"] > MOST_COST]
    return found + [f"{one['jobs_per_claim']} jobs per claim: cost {one['ratio']}" for one in dear]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, action="append", help="only cases with so many; may be repeated")
    parser.add_argument("--fast", action="store_true", help="a few small cases")
    parser.add_argument("--only", choices=("cases", "cost"), help="the other part of --out is kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--before", default=BEFORE, help="commit to be compared with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cases = [case for case in (FAST if options.fast else CASES) if case.workers in (options.workers or [case.workers])]
    found: dict[str, Any] = {"cases": [], "cost": []}
    if options.out and options.only and options.out.exists():
        found = json.loads(options.out.read_text())
    with EmbeddedRedis() as server:
        host = describe_host(server.url, [])
    with tempfile.TemporaryDirectory() as folder:
        before = exported(options.before, folder)
        if options.only != "cost":
            print(f"{'case':50} {'':6}", *(f"{column:>9}" for column in COLUMNS))
            found["cases"] = [compare(dataclasses.replace(case, seed=options.seed), before) for case in cases]
        if options.only != "cases" and not options.fast:
            found["cost"] = costs(before)
    command = " ".join(["python", "benchmarks/spread", *sys.argv[1:]])
    found |= {
        "what": "makespans as multiples of the ideal one, on the real broker with simulated engines",
        "remarks": REMARKS,
        "commands": [*found.get("commands", ()), command],
        "before": options.before,
        "seed": options.seed,
        "curves": CURVES,
        "measured": MEASURED,
        "tokens": {"median": MEDIAN, "sigma": SIGMA, "most": MOST, "prompt": PROMPT},
        "room": ROOM,
        "host": host,
        "missed": missed(found["cases"], found["cost"]),
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    worst = {side: max((row[side]["ratio"] for row in found["cases"]), default=None) for side in ("now", "before")}
    cost = {one["jobs_per_claim"]: one["ratio"] for one in found["cost"]}
    print(json.dumps({"worst_ratio": worst, "cost": cost, "missed": found["missed"]}))
    if found["missed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
