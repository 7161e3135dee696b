"""Shows the demo's progress: a live view on a terminal, elsewhere a line every ten steps."""

from __future__ import annotations

import time
from collections import Counter
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .pool import Workers
from .trainer import Step
from .watch import Watch

LINE_EVERY = 10
DRAW_EVERY_S = 0.5
WINDOW = 10
BARS = "▁▂▃▄▅▆▇█"


class View:
    """Shows steps as they come. Only a terminal gets the live view."""

    def __init__(self, planned: int, workers: Workers, watch: Watch, console: Console) -> None:
        self._planned, self._workers, self._watch = planned, workers, watch
        self._console = console
        self._steps: list[Step] = []
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            if self._steps:
                self._live.update(self._picture(), refresh=True)
            self._live.stop()

    def show(self, step: Step) -> None:
        """Show one more step."""
        self._steps.append(step)
        if self._live is None:
            if step.number % LINE_EVERY == 0 or step.number == 1:
                self._console.print(self._line(), soft_wrap=True, highlight=False)
        elif time.monotonic() - self._drawn > DRAW_EVERY_S:
            self._drawn = time.monotonic()
            self._live.update(self._picture(), refresh=True)

    def _recent(self) -> tuple[float, Counter[int], float]:
        """(mean reward, tokens by staleness, tokens per second) of the last steps."""
        recent = self._steps[-WINDOW:]
        before = self._steps[-WINDOW - 1] if len(self._steps) > WINDOW else None
        tokens = recent[-1].tokens - (before.tokens if before else 0)
        seconds = recent[-1].at - (before.at if before else 0.0)
        stale: Counter[int] = Counter()
        for step in recent:
            stale += step.stale
        return sum(step.reward for step in recent) / len(recent), stale, tokens / max(seconds, 1e-9)

    def _line(self) -> str:
        step, glance = self._steps[-1], self._watch.latest
        reward, stale, speed = self._recent()
        mean = sum(version * count for version, count in stale.items()) / max(1, stale.total())
        workers = ", ".join(f"{name} {state} v{version}" for name, _, state, version, *_ in self._rows())
        return (
            f"[{step.at:5.1f} s] step {step.number:3d}/{self._planned}  reward {reward:.3f}  staleness {mean:.1f} "
            f"(max {max(stale, default=0)})  {speed:5.0f} tok/s  queue {glance.queued}  {workers}"
        )

    def _rows(self) -> list[tuple[str, int, str, int, int, int]]:
        """Per worker: name, pid, state, version, samples running, samples finished."""
        rows = []
        for worker in self._workers.all.values():
            status = self._watch.latest.workers.get(worker.pid) or self._watch.worker(worker.pid)
            state = "killed" if worker.killed else status.state if status else "starting"
            numbers = (status.version, status.running, status.finished_samples) if status else (0, 0, 0)
            rows.append((worker.name, worker.pid, str(state), *numbers))
        return rows

    def _picture(self) -> Panel:
        step, glance = self._steps[-1], self._watch.latest
        reward, stale, speed = self._recent()
        facts = Table.grid(padding=(0, 2))
        facts.add_row("step", f"{step.number} of {self._planned}", "time", f"{step.at:.0f} s")
        facts.add_row("reward", f"{reward:.3f}", "trainer", f"version {step.number}")
        facts.add_row("tokens/s", f"{speed:.0f}", "queue", f"{glance.queued} jobs")
        rows = self._rows()
        in_use = sorted({version for _, _, state, version, *_ in rows if state in {"serving", "updating"}})
        facts.add_row("waiting", f"{step.waited:.2f} s", "in use", ", ".join(f"v{version}" for version in in_use))
        workers = Table("worker", "pid", "state", "version", "running", "samples", box=None, header_style="bold")
        colours = {"serving": "green", "killed": "red", "draining": "yellow"}
        for name, pid, state, *numbers in rows:
            workers.add_row(name, str(pid), Text(state, colours.get(state, "cyan")), *map(str, numbers))
        curve = Text("reward     ") + Text(_curve([step.reward for step in self._steps], 60), "green")
        body = Group(facts, Text(), curve, Text("staleness"), _histogram(stale), Text(), workers)
        return Panel(body, title="RolloutMQ: asynchronous RL on a pool", width=80)


def _curve(values: list[float], width: int) -> str:
    """Values from 0 to 1 as bars, the newest at the right; long series are averaged into `width` columns."""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join(BARS[min(len(BARS) - 1, int(mean * len(BARS)))] for mean in means)


def _histogram(stale: Counter[int]) -> Table:
    table = Table.grid(padding=(0, 1))
    total = max(1, stale.total())
    for versions in range(max(stale, default=0) + 1):
        share = stale[versions] / total
        table.add_row(f"  {versions:2d} behind", "█" * round(40 * share), f"{share:.0%}")
    return table
