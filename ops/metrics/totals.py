"""Sums over workers that come and go: counters that never fall, and what the pool can generate in a second."""

from __future__ import annotations

from collections import deque

from ...messages.model import STALENESS_BOUNDS, WorkerStatus
from ...worker.metrics import SYNC_BOUNDS, Histogram, finite
from .reading import Reading

MOST_PER_S = 10_000_000
"""More tokens or samples a second no worker has; a heartbeat that says so is not counted."""
WINDOW_S = 60.0
"""Seconds with work over which the rate is measured."""


class Totals:
    """What the exporter has seen happen since it started.

    tokens, samples, engine_restarts, refused_publishes: sums over all workers. staleness: of finished samples. rate:
    tokens a second while something ran, over the last WINDOW_S such seconds; None before anything did. It stays when
    the workers are gone. syncs: seconds of transfers, one for each worker. failed_syncs: transfers that a worker
    refused.
    """

    def __init__(self) -> None:
        self.tokens = self.samples = self.engine_restarts = self.refused_publishes = 0
        self.staleness = Histogram(STALENESS_BOUNDS)
        self.syncs = Histogram(SYNC_BOUNDS)
        self.sync_bytes = self.failed_syncs = 0
        self.last_bytes_per_s = 0.0
        self.rate: float | None = None
        self.tokens_per_sample: float | None = None
        self._last: dict[str, WorkerStatus] | None = None
        self._last_at = 0.0
        self._window: deque[tuple[float, int]] = deque()

    def take_in(self, reading: Reading, now: float) -> None:
        """Count what has happened since the reading before. now: on time.monotonic."""
        elapsed, before = now - self._last_at, self._last
        tokens = self.tokens
        if before is not None:  # what happened before the first reading is not counted: that would look like a jump
            for status in reading.pool.workers:
                self._add(status, before.get(status.worker_id), elapsed)
            if self.tokens > tokens or any(worker.running for worker in reading.pool.workers):
                self._measure(elapsed, self.tokens - tokens)
        self._last = {status.worker_id: status for status in reading.pool.workers}
        self._last_at = now
        ended = [worker for worker in reading.pool.workers if _plausible(worker)]
        if samples := sum(worker.finished_samples for worker in ended):
            self.tokens_per_sample = sum(worker.generated_tokens for worker in ended) / samples
        self._transfers(reading)

    def _add(self, status: WorkerStatus, before: WorkerStatus | None, elapsed: float) -> None:
        most = MOST_PER_S * max(1.0, elapsed)

        def more(name: str) -> int:
            """How much a total has grown; 0 for a number that cannot be."""
            grown = int(getattr(status, name)) - (int(getattr(before, name)) if before else 0)
            return grown if 0 <= grown <= most else 0

        self.tokens += more("generated_tokens")
        self.samples += more("finished_samples")
        self.engine_restarts += more("engine_restarts")
        self.refused_publishes += more("refused_publishes")
        counts, had = status.staleness, before.staleness if before else ()
        if len(counts) == len(STALENESS_BOUNDS) + 1:
            grown = [count - (had[i] if len(had) == len(counts) else 0) for i, count in enumerate(counts)]
            self.staleness.add([count if 0 <= count <= most else 0 for count in grown])

    def _measure(self, seconds: float, tokens: int) -> None:
        self._window.append((seconds, tokens))
        while len(self._window) > 1 and sum(it[0] for it in self._window) - self._window[0][0] >= WINDOW_S:
            self._window.popleft()
        busy, generated = sum(it[0] for it in self._window), sum(it[1] for it in self._window)
        if busy > 0 and generated > 0:
            self.rate = generated / busy

    def _transfers(self, reading: Reading) -> None:
        for epoch in reading.ended:
            for report in epoch.reports.values():
                if not report.ok:
                    self.failed_syncs += 1
                    continue
                seconds = finite(report.seconds)
                self.syncs.observe(seconds)
                nbytes = report.nbytes if 0 <= report.nbytes < 1 << 50 else 0
                self.sync_bytes += nbytes
                self.last_bytes_per_s = finite(nbytes / seconds) if seconds > 0 else 0.0


def _plausible(worker: WorkerStatus) -> bool:
    return worker.generated_tokens <= MOST_PER_S * 86400 * 365 and worker.finished_samples < 1 << 50
