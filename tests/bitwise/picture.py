"""Two runs' losses as one picture: `python -m bitwise.picture out/bitwise/own faults-3 docs/bitwise.svg`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .record import steps_of

NAMES = {
    "kill_worker": "worker killed", "freeze_worker": "worker frozen", "kill_engine": "engine killed",
    "restart_redis": "Redis restarted", "slow_redis": "Redis slow", "fail_over": "Redis fails over",
    "late_worker": "worker joins", "spot_notice": "spot notice", "kill_trainer": "trainer killed",
}  # fmt: skip


def losses(folder: Path) -> tuple[list[int], list[float]]:
    """Steps from 1, and their losses; one that was taken again is there as often."""
    lines = sorted(steps_of(folder), key=lambda line: line["step"])
    return [line["step"] + 1 for line in lines], [float.fromhex(line["loss"]) for line in lines]


def struck(run: dict[str, Any]) -> list[tuple[int, str]]:
    found = [re.fullmatch(r"(\w+) at step (\d+)", fault) for fault in run["faults"]]
    return [(int(it[2]) + 1, NAMES[it[1]]) for it in found if it is not None]


def main(folder: Path, run: str, file: Path) -> None:
    matplotlib.rcParams["svg.fonttype"] = "none"
    (program,) = [
        it for it in json.loads((folder.parent / "report.json").read_text())["programs"] if it["program"] == folder.name
    ]
    (one,) = [it for it in program["told"] if it["run"] == run]
    faults = struck(one)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*losses(folder / "undisturbed"), color="#93c5fd", linewidth=6, label="undisturbed")
    axes.plot(*losses(folder / run), color="#1e3a8a", linewidth=1.5, label=f"under {len(faults)} faults")
    for step, name in faults:
        axes.axvline(step, color="#c2410c", linestyle=":", linewidth=1)
        axes.annotate(name, (step, 1.01), xycoords=("data", "axes fraction"), rotation=50, fontsize=8, color="#9a3412")
    axes.set(xlabel="step", ylabel="loss", xlim=(1, one["steps"]))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", frameon=False, ncols=2)
    figure.savefig(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
