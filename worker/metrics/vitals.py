"""What a worker knows of itself that others ask for: its last heartbeat, the staleness of its samples, its gate."""

from __future__ import annotations

import time

from ...messages.model import STALENESS_BOUNDS, WorkerStatus
from ..generation import Generation
from ..jobs import Run, SampleRun
from .histogram import Histogram
from .startup import Startup

SILENT_S = 60.0
"""A worker that has not even tried a heartbeat for so long, or for three leases, is stuck."""


class Vitals:
    """What one worker shows. It belongs to the worker's event loop; other threads only read it.

    committed: the pool's newest version, as the last heartbeat's answer had it. status: of the last heartbeat, None
    before the first. startup: how long its start took.
    """

    def __init__(self, generation: Generation, lease_s: float) -> None:
        self.generation = generation
        self.committed = 0
        self.status: WorkerStatus | None = None
        self.startup = Startup()
        self._samples = Histogram(STALENESS_BOUNDS)
        self._silent_s = max(SILENT_S, 3 * lease_s)
        self._beat_at = 0.0

    @property
    def staleness(self) -> tuple[int, ...]:
        """Finished samples by staleness, as WorkerStatus has them."""
        return tuple(self._samples.counts)

    @property
    def samples(self) -> Histogram:
        return self._samples

    @property
    def live(self) -> bool:
        """Whether the worker still tries to send heartbeats. It need not reach Redis. True until it first joins."""
        return self.status is None or time.monotonic() - self._beat_at < self._silent_s

    @property
    def ready(self) -> bool:
        """Whether it has joined and serves weights that were verified."""
        return self.status is not None and self.status.state in {"serving", "updating", "paused"}

    def beat(self, status: WorkerStatus) -> WorkerStatus:
        """Note the heartbeat that is about to be sent."""
        self.status, self._beat_at = status, time.monotonic()
        if self.ready:
            self.startup.serves()
        return status

    def finished(self, sample: Run) -> None:
        """Count a sample that has ended, by how many versions its oldest token is behind the pool's newest."""
        self.startup.answered(sample.engine_s)
        if isinstance(sample, SampleRun) and sample.segments:
            newest = max(self.committed, self.generation.version)
            self._samples.observe(newest - sample.segments[0].version)
