"""Draw what `python -m benchmarks queue --out` or `scale --out` wrote.

python -m benchmarks.plots RESULT.json docs/queue.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SYSTEMS = {
    "rq_fork": "RQ\n(fork)",
    "rq": "RQ\n(simple)",
    "arq": "arq",
    "taskiq_stream": "taskiq\n(stream)",
    "taskiq_list": "taskiq\n(list)",
    "rolloutmq": "RolloutMQ",
    "raw": "its scripts\nalone",
}
COLOURS = {"rolloutmq": "#2a6fb0", "raw": "#c7c7c7"}
PEER = "#8c8c8c"
USES = {"used": "#2a6fb0", "idle": "#c7c7c7", "starting": "#b45f06"}


def draw_queue(figures: dict[str, Any]) -> Any:
    """Jobs per second by system, and Redis' CPU per job and per heartbeat by the number of workers."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", width_ratios=[3, 2])
    _bars(left, figures)
    _growth(right, figures)
    host = figures["host"]
    figure.supxlabel(
        f"{host['cores']} cores of {host['cpu']}, Redis {host['redis']}, Python {host['python']}; "
        f"p50 {figures['p50_ms']} ms, p99 {figures['p99_ms']} ms at a tenth of the load",
        fontsize=8,
    )
    return figure


def _bars(axis: Any, figures: dict[str, Any]) -> None:
    names = [name for name in SYSTEMS if figures.get(name)]
    rates = [figures[name] for name in names]
    rounds = [figures["rounds"][name] for name in names]
    errors = [
        [rate - min(found) for rate, found in zip(rates, rounds, strict=True)],
        [max(found) - rate for rate, found in zip(rates, rounds, strict=True)],
    ]
    bars = axis.bar(
        [SYSTEMS[name] for name in names],
        rates,
        color=[COLOURS.get(name, PEER) for name in names],
        yerr=errors,
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    axis.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=4, fontsize=9)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.yaxis.set_minor_formatter("")
    axis.set_ylim(min(rates) / 2, max(rates) * 2.5)
    axis.set_ylabel("jobs per second, submitted to answered (log)")
    axis.set_title("1 KB jobs, one client, one worker, one Redis")
    axis.grid(axis="y", alpha=0.25)
    axis.set_axisbelow(True)


def _growth(axis: Any, figures: dict[str, Any]) -> None:
    for key, label, colour in (
        ("redis_us_per_lifecycle", "per job", "#2a6fb0"),
        ("redis_us_per_heartbeat", "per heartbeat", "#4c9f70"),
    ):
        costs = {int(workers): cost for workers, cost in figures[key].items()}
        axis.plot(list(costs), list(costs.values()), marker="o", color=colour, label=label)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(0, 1.2 * axis.get_ylim()[1])
    axis.set(
        xlabel="workers, each holding 256 jobs", ylabel="µs of Redis' CPU", title="What it costs as the pool grows"
    )
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right")


def draw_scale(figures: dict[str, Any]) -> Any:
    """Workers by what they do, jobs in the queue, and how long new jobs waited, over simulated time."""
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
    return figure


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    # Text stays text, and ids and dates are fixed: the same result gives the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "rolloutmq", "font.size": 10})
    figures = json.loads(source.read_text())
    figure = draw_scale(figures) if "scenario" in figures else draw_queue(figures)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


if __name__ == "__main__":
    main()
