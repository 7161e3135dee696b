"""Incidents in the demo: one worker is killed, another one joins later."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .pool import WorkerProcess, Workers, runs
from .tally import Tally
from .watch import Watch

PATIENCE = 10
"""The kill waits at most so many steps."""


@dataclass(slots=True)
class Incidents:
    """Kills the worker that holds most jobs at `kill_step`, and starts another one at `join_step`.

    The kill waits a few steps for a moment in which there is something to lose.

    Times are in seconds of time.monotonic(). They are None as long as it has not happened.
    """

    workers: Workers
    watch: Watch
    tally: Tally
    kill_step: int
    join_step: int
    victim: WorkerProcess | None = None
    killed_at: float | None = None
    newcomer: WorkerProcess | None = None

    def after(self, step: int) -> None:
        """Call this after each step."""
        if step >= self.kill_step and self.victim is None:
            held = {worker.name: self.watch.held_now(worker.pid) for worker in self.workers.all.values()}
            busiest = max(held, key=held.__getitem__)
            if held[busiest] or step >= self.kill_step + PATIENCE:
                self.victim = self.workers.all[busiest]
                self.victim.kill()
                self.killed_at = time.monotonic()
        if step >= self.join_step and self.newcomer is None:
            self.newcomer = self.workers.start()

    @property
    def victim_reaped(self) -> bool:
        """The killed worker's processes are gone, and the pool has taken its lease and its jobs away."""
        if self.victim is None or runs(self.victim.pid):
            return False
        return self.watch.worker(self.victim.pid) is not None and self.victim.pid not in self.watch.latest.workers

    @property
    def newcomer_delivered(self) -> bool:
        """Results of the worker that came late have arrived at the trainer."""
        if self.newcomer is None:
            return False
        return any(self.tally.by_worker[worker_id] > 0 for worker_id in self.watch.ids_of(self.newcomer.pid))

    @property
    def complete(self) -> bool:
        """Whether both have happened."""
        return self.victim_reaped and self.newcomer_delivered
