"""What the demo says while it trains: a line every ten steps. `rolloutmq top` shows its pool live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .pool import Workers
from .trainer import Step
from .watch import Watch

LINE_EVERY = 10
WINDOW = 10


def line(steps: Sequence[Step], planned: int, workers: Workers, watch: Watch) -> str:
    """The last step, means over the last WINDOW of them, and the workers."""
    recent, before = steps[-WINDOW:], steps[-WINDOW - 1] if len(steps) > WINDOW else None
    tokens = recent[-1].tokens - (before.tokens if before else 0)
    seconds = recent[-1].at - (before.at if before else 0.0)
    stale = sum((step.stale for step in recent), Counter[int]())
    mean = sum(version * count for version, count in stale.items()) / max(1, stale.total())
    there = []
    for worker in workers.all.values():
        status = watch.latest.workers.get(worker.pid) or watch.worker(worker.pid)
        state = "killed" if worker.killed else status.state if status else "starting"
        there.append(f"{worker.name} {state} v{status.version if status else 0}")
    return (
        f"[{recent[-1].at:5.1f} s] step {recent[-1].number:3d}/{planned}  "
        f"reward {sum(step.reward for step in recent) / len(recent):.3f}  staleness {mean:.1f} "
        f"(max {max(stale, default=0)})  {tokens / max(seconds, 1e-9):5.0f} tok/s  queue {watch.latest.queued}  "
        f"{', '.join(there)}"
    )
