"""Draw a day of `python -m benchmarks scale --out`: python -m benchmarks.plot_scale RESULT.json docs/scale.svg"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

USES = {"used": "#2a6fb0", "idle": "#c7c7c7", "starting": "#b45f06"}


def draw(figures: dict[str, Any], path: Path) -> None:
    """Workers by what they do, jobs in the queue, and how long new jobs waited, over simulated time."""
    # Text stays text, and ids and dates are fixed: the same result gives the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rolloutmq", "font.size": 10})
    scenario, run = figures["scenario"], figures["with_partials"]
    rows = run["timeline"]
    hours = [row["minute"] / 60 for row in rows]
    figure, axes = plt.subplots(3, 1, figsize=(10, 7), sharex=True, layout="constrained", height_ratios=[3, 1.4, 1.4])
    axes[0].stackplot(
        hours, *([row[use] for row in rows] for use in USES), labels=list(USES), colors=list(USES.values())
    )
    needs = scenario["max_workers"]
    parts = [part * scenario["minutes"] / 60 / len(scenario["load"]) for part in range(len(scenario["load"]) + 1)]
    axes[0].stairs([needs * share for share in scenario["load"]], parts, color="black", linestyle="--", label="load")
    axes[0].set(ylabel="workers", title=f"{needs} workers at most, the load of a day, pre-emptions")
    axes[0].legend(loc="upper left", ncols=4)
    axes[1].plot(hours, [row["queued"] for row in rows], color="#2a6fb0", linewidth=1)
    axes[1].set_ylabel("jobs queued")
    axes[2].plot(hours, [row["queue_s"] for row in rows], color="#2a6fb0", linewidth=1)
    axes[2].set(ylabel="median wait of\nnew jobs, s", xlabel="simulated hours", xlim=(0, hours[-1]))
    for axis in axes:
        axis.grid(alpha=0.25)
    figure.supxlabel(
        f"{run['samples']:,} samples; {run['tokens']['wasted_share']:.3%} of tokens wasted; queue p50 "
        f"{run['queue_s']['p50']:.0f} s, p95 {run['queue_s']['p95']:.0f} s; GPU hours: {run['gpu_hours']['used']:,.0f} "
        f"used, {run['gpu_hours']['idle']:,.0f} idle, {run['gpu_hours']['starting']:,.0f} starting",
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    source, target = sys.argv[1:]
    draw(json.loads(Path(source).read_text()), Path(target))
