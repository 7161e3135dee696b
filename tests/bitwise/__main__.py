"""`python -m bitwise`: a run undisturbed, and again under faults; are they one? `make bitwise` starts it."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engines.forking import install

from benchmarks.harness import host
from benchmarks.replay import TEXT, write_model

from .faults import NAMES, drawn, strike
from .record import END, differences, steps_of
from .world import world

PROGRAMS = ("own", "grpo", "tools")


@dataclass(frozen=True)
class Plan:
    """Of a program: its steps, how many runs have faults, which are drawn from these, and the model's shape."""

    steps: int = 60
    runs: int = 10
    seed: str = "7"
    faults: tuple[str, ...] = NAMES
    shape: str = TEXT  # the tiny model, or one of benchmarks/sync/shapes.py


async def one(program: str, model: Path, folder: Path, plan: Plan, seed: str | None) -> dict[str, Any]:
    """One run; seed: of its faults, None for none. Returns what happened."""
    main = importlib.import_module(f"bitwise.{program}").main
    async with world(model, folder, 2) as made:
        began = time.monotonic()
        await made.start_trainer(main, plan.steps)
        struck = [] if seed is None else await strike(made, drawn(seed, plan.steps, plan.faults), seed)
        await made.end()
        seconds = time.monotonic() - began
    lines = steps_of(folder)
    told = {"run": folder.name, "seconds": round(seconds, 1), "steps": len({it["step"] for it in lines})}
    again = len(lines) - told["steps"]
    return told | {"taken_again": again, "faults": struck, **json.loads((folder / END).read_text())}


async def compare(program: str, out: Path, plan: Plan) -> dict[str, Any]:
    """A program's runs. Every one has a folder of its own below `out`."""
    model = out / plan.shape
    if not model.exists():
        write_model(model, plan.shape)
    shutil.rmtree(out / program, ignore_errors=True)
    told = [await one(program, model, out / program / "undisturbed", plan, None)]
    print(json.dumps(told[0]), flush=True)
    for number in range(plan.runs):
        folder = out / program / f"faults-{number}"
        found = await one(program, model, folder, plan, f"{plan.seed}/{program}/{number}")
        found["differences"] = differences(out / program / "undisturbed", folder)[:5]
        told.append(found)
        print(json.dumps(found), flush=True)
    same = sum(not it["differences"] for it in told[1:])
    return {"program": program, "steps": plan.steps, "runs": plan.runs, "same": same, "seed": plan.seed, "told": told}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bitwise", description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--runs", type=int, default=Plan.runs)
    parser.add_argument("--seed", default=Plan.seed)
    parser.add_argument("--faults", default=",".join(NAMES), help="drawn from these")
    parser.add_argument("--shape", default=Plan.shape, help="of the model, as `python -m benchmarks sync` has them")
    parser.add_argument("--out", type=Path, default=Path("out/bitwise"))
    given = parser.parse_args()
    plan = Plan(given.steps, given.runs, given.seed, tuple(given.faults.split(",")), given.shape)
    given.out.mkdir(parents=True, exist_ok=True)
    install()  # what is imported once, before the proxies have anything to do
    found: list[dict[str, Any]] = []
    report = {"programs": found, "host": host(), "command": "python -m bitwise " + shlex.join(sys.argv[1:])}
    for program in given.programs.split(","):
        found.append(asyncio.run(compare(program, given.out, plan)))
        (given.out / "report.json").write_text(json.dumps(report, indent=1))
        print(f"{program}: {found[-1]['same']} of {given.runs} runs with faults are the undisturbed one, bit for bit")
    return int(any(it["same"] < it["runs"] for it in found))


if __name__ == "__main__":
    sys.exit(main())
