"""The picture of a run: reward, staleness, throughput, and the lives of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .incidents import Incidents
from .trainer import Step
from .watch import Watch

COLOURS = {
    "starting": "#c7c7c7",
    "syncing": "#f0c05a",
    "serving": "#4c9f70",
    "updating": "#2a6fb0",
    "draining": "#b58ad6",
    "paused": "#8c8c8c",
    "quarantined": "#d1495b",
}
SMOOTH = 10


def draw_report(
    path: Path, steps: Sequence[Step], watch: Watch, incidents: Incidents, *, began: float, title: str
) -> None:
    """Write a PNG. began: time.monotonic() of the first submission, the zero of all time axes."""
    import matplotlib  # noqa: PLC0415 – a second of imports, at the end of the run

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(4, 1, figsize=(10, 13), sharex=True, layout="constrained")
    figure.suptitle(title)
    _reward(axes[0], steps)
    _staleness(axes[1], steps)
    _throughput(axes[2], steps, watch, began)
    _lifelines(axes[3], watch, incidents, began)
    for axis in axes:
        axis.grid(alpha=0.25)
        if incidents.killed_at is not None:
            axis.axvline(incidents.killed_at - began, color="#d1495b", linestyle="--", linewidth=1)
        if incidents.newcomer is not None:
            axis.axvline(incidents.newcomer.started - began, color="#4c9f70", linestyle="--", linewidth=1)
    axes[3].set_xlabel("seconds since the first job (red: SIGKILL, green: late worker started)")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _reward(axis: Any, steps: Sequence[Step]) -> None:
    times = [step.at for step in steps]
    rewards = [step.reward for step in steps]
    smooth = [sum(part) / len(part) for part in (rewards[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(rewards)))]
    axis.plot(times, rewards, color="#9fc5e8", linewidth=1, label="batch")
    axis.plot(times, smooth, color="#1f4e79", linewidth=2, label=f"mean of {SMOOTH} steps")
    axis.set(ylabel="reward", ylim=(0, 1.02), title="Reward of samples from the pool")
    axis.legend(loc="lower right")


def _staleness(axis: Any, steps: Sequence[Step]) -> None:
    times = [step.at for step in steps]
    means = [sum(k * n for k, n in step.stale.items()) / max(1, step.stale.total()) for step in steps]
    low, high = [min(step.stale, default=0) for step in steps], [max(step.stale, default=0) for step in steps]
    axis.fill_between(times, low, high, color="#f0c05a", alpha=0.4, label="range")
    axis.plot(times, means, color="#b45f06", label="mean of tokens")
    axis.set(ylabel="versions behind", title="Staleness: trainer's version minus the one that sampled a token")
    axis.legend(loc="upper left")


def _throughput(axis: Any, steps: Sequence[Step], watch: Watch, began: float) -> None:
    spans = [(steps[i - 5], steps[i]) for i in range(5, len(steps))]
    axis.plot(
        [b.at for _, b in spans], [(b.tokens - a.tokens) / max(1e-9, b.at - a.at) for a, b in spans], color="#1f4e79"
    )
    axis.set(ylabel="tokens/s received", title="Throughput, and jobs waiting in the queue", ylim=(0, None))
    queue = axis.twinx()
    queue.plot([glance.at - began for glance in watch.glances], [glance.queued for glance in watch.glances],
               color="#8c8c8c", linewidth=1)  # fmt: skip
    queue.set(ylabel="jobs queued", ylim=(0, None))


def _lifelines(axis: Any, watch: Watch, incidents: Incidents, began: float) -> None:
    names = list(incidents.workers.all)
    span = watch.latest.at - began
    seen: set[str] = set()
    for row, worker in enumerate(incidents.workers.all.values()):
        lives = [(glance.at - began, glance.workers.get(worker.pid)) for glance in watch.glances]
        points = [(at, status) for at, status in lives if status is not None]
        starts = [(worker.started - began, "starting"), *((at, str(status.state)) for at, status in points)]
        end = points[-1][0] if points else starts[0][0]
        if worker is incidents.victim and incidents.killed_at is not None:
            end = incidents.killed_at - began
            axis.plot([end], [row], marker="x", color="#d1495b", markersize=12, markeredgewidth=3, zorder=3)
        starts = [(at, state) for at, state in starts if at <= end]
        for (at, state), (until, _) in zip(starts, [*starts[1:], (end, "")], strict=True):
            axis.barh(row, until - at, left=at, height=0.5, color=COLOURS.get(state, "#000000"),
                      label=None if state in seen else state)  # fmt: skip
            seen.add(state)
        labelled = -span
        for at, status in points:
            if at - labelled >= span / 16 and at <= end:
                axis.annotate(f"v{status.version}", (at, row), (0, 14), textcoords="offset points", fontsize=7)
                labelled = at
    axis.set_yticks(range(len(names)), names)
    axis.set(title="Workers", ylim=(-0.6, len(names) - 0.2))
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, -0.35), ncols=len(seen) or 1, fontsize=8)
