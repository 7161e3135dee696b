"""What a worker knows of itself that others ask for: its last heartbeat, its samples, its transfers, its cache."""

from __future__ import annotations

import asyncio
import time

from ...messages.errors import RolloutMQError
from ...messages.model import STALENESS_BOUNDS, WorkerStatus
from ...sync.transfer import TransferReport
from ..engine import Engine
from ..generation import Generation
from ..jobs import Run, SampleRun
from .histogram import SYNC_BOUNDS, Histogram, finite
from .startup import Startup

SILENT_S = 60.0
"""A worker that has not even tried a heartbeat for so long, or for three leases, is stuck."""
KV_S = 5.0
"""Between two looks at the KV cache."""


class Vitals:
    """What one worker shows. It belongs to the worker's event loop; other threads only read it.

    committed: the pool's newest version, as the last heartbeat's answer had it. status: of the last heartbeat, None
    before the first. startup: how long its start took. samples: those that ended, by staleness.
    syncs: seconds of successful transfers. sync_bytes: what they brought. last_bytes_per_s: of the last one.
    failed_syncs: transfers that failed. kv_use: share of the KV cache that requests hold, 0 to 1, as of KV_S ago; None
    if nobody asks, or the engine does not say.
    """

    def __init__(self, generation: Generation, lease_s: float) -> None:
        self.generation = generation
        self.committed = 0
        self.status: WorkerStatus | None = None
        self.startup = Startup()
        self.samples, self.syncs = Histogram(STALENESS_BOUNDS), Histogram(SYNC_BOUNDS)
        self.sync_bytes = self.failed_syncs = 0
        self.last_bytes_per_s = 0.0
        self.kv_use: float | None = None
        self._silent_s = max(SILENT_S, 3 * lease_s)
        self._beat_at = 0.0

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
        """Count a sample that has ended, by how many versions its oldest token is behind the pool's newest.

        One of exactly one version is not stale.
        """
        self.startup.answered(sample.engine_s)
        if isinstance(sample, SampleRun) and sample.segments and sample.job.exact_version is None:
            newest = max(self.committed, self.generation.version)
            self.samples.observe(newest - sample.segments[0].version)

    def synced(self, report: TransferReport) -> None:
        """Count a transfer that was loaded, or failed in either half. The first half's success says nothing yet."""
        if not report.ok:
            self.failed_syncs += 1
        elif report.phase == "done":
            seconds = finite(report.seconds)
            self.syncs.observe(seconds)
            self.sync_bytes += report.nbytes
            self.last_bytes_per_s = report.nbytes / seconds if seconds > 0 else 0.0

    async def watch_cache(self, engine: Engine) -> None:
        """Ask for `kv_use` until cancelled."""
        while True:
            try:
                told = await engine.operate("kv_use", {})
                self.kv_use = min(1.0, int(told["used"]) / max(1, int(told["tokens"])))
            except (RolloutMQError, KeyError, TypeError, ValueError):  # it is away, or cannot tell
                self.kv_use = None
            await asyncio.sleep(KV_S)
