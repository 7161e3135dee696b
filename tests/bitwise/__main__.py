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
from pathlib import Path
from typing import Any

from support.engines.forking import install

from benchmarks.harness import host
from benchmarks.sync.shapes import one_shape, write_random
from rolloutmq.ops.tiny_model import write_tiny_model

from .faults import NAMES, Stroke, drawn, strike
from .record import END, ENGINE_DTYPE, differences, steps_of
from .world import world

PROGRAMS = ("own", "grpo", "tools")


async def one(program: str, model: Path, folder: Path, steps: int, strokes: list[Stroke], seed: str) -> dict[str, Any]:
    """One run under these faults; seed: of what they strike. Returns what happened."""
    main = importlib.import_module(f"bitwise.{program}").main
    async with world(model, folder, 2) as made:
        began = time.monotonic()
        await made.start_trainer(main, steps)
        struck = await strike(made, strokes, seed)
        await made.end()
        seconds = time.monotonic() - began
    lines = steps_of(folder)
    told = {"run": folder.name, "seconds": round(seconds, 1), "steps": len({it["step"] for it in lines})}
    again = len(lines) - told["steps"]
    return told | {"taken_again": again, "faults": struck, **json.loads((folder / END).read_text())}


async def compare(
    program: str, out: Path, steps: int, runs: int, seed: str, faults: tuple[str, ...] = NAMES, shape: str = ""
) -> dict[str, Any]:
    """A program's runs. Every one has a folder of its own below `out`. shape: of the model, by default the tiny one."""
    model = out / (shape or "model")
    if not model.exists():
        if shape:
            write_random(one_shape(shape), model)
        else:
            write_tiny_model(model, dtype=ENGINE_DTYPE)
    shutil.rmtree(out / program, ignore_errors=True)
    told = [await one(program, model, out / program / "undisturbed", steps, [], seed)]
    print(json.dumps(told[0]), flush=True)
    for number in range(runs):
        folder = out / program / f"faults-{number}"
        drawn_from = f"{seed}/{program}/{number}"
        found = await one(program, model, folder, steps, drawn(drawn_from, steps, faults), drawn_from)
        found["differences"] = differences(out / program / "undisturbed", folder)[:5]
        told.append(found)
        print(json.dumps(found), flush=True)
    same = sum(not it["differences"] for it in told[1:])
    return {"program": program, "steps": steps, "runs": runs, "same": same, "seed": seed, "told": told}


def main() -> int:
    parser = argparse.ArgumentParser(prog="bitwise", description=__doc__)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", default="7")
    parser.add_argument("--faults", default=",".join(NAMES), help="drawn from these")
    parser.add_argument("--shape", default="", help="of the model: 0.6b, … (benchmarks/sync/shapes.py)")
    parser.add_argument("--out", type=Path, default=Path("out/bitwise"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    install()  # what is imported once, before the proxies have anything to do
    found: list[dict[str, Any]] = []
    report = {"programs": found, "host": host(), "command": "python -m bitwise " + shlex.join(sys.argv[1:])}
    for program in given.programs.split(","):
        faults = tuple(given.faults.split(","))
        found.append(
            asyncio.run(compare(program, given.out, given.steps, given.runs, given.seed, faults, given.shape))
        )
        (given.out / "report.json").write_text(json.dumps(report, indent=1))
        print(f"{program}: {found[-1]['same']} of {given.runs} runs with faults are the undisturbed one, bit for bit")
    return int(any(it["same"] < it["runs"] for it in found))


if __name__ == "__main__":
    sys.exit(main())
