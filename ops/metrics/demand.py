"""What a pool needs, measured from one look to the next, for the policy of `ops/scale`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from ...messages.model import WorkerStatus
from ...messages.redis import PoolRedis
from ..scale import FULL, PoolView
from .reading import PoolReader, Reading
from .totals import Totals

log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""A look that takes longer counts as failed."""
WINDOW_S = 60.0
"""Seconds over which what the pool does now is measured."""
WORKER_S = 1200.0
"""What a full worker generates is measured over so many seconds of full workers; what was earlier counts less."""
LONGEST_S = 3600.0
BATCHES = 4
"""Versions of the trainer over which is measured what it takes: at least WINDOW_S, at most LONGEST_S seconds."""
VERSIONS = 8
"""Newest versions whose times say how often the trainer publishes."""
SERVING, STARTING = ("serving", "updating"), ("starting", "syncing", "quarantined")


class Demand:
    """Turns readings of one pool into views of it. Needs no library, and no clock of its own."""

    def __init__(self) -> None:
        self._last: PoolView | None = None
        self._results: deque[tuple[float, int, int, int]] = deque()  # seconds, bytes made, bytes taken, tokens; totals
        self._window: deque[tuple[float, int, int, float]] = deque()  # seconds, tokens, samples, running x seconds
        self._before = (0, 0)
        self._full_s = self._full_tokens = 0.0
        self._versions: deque[tuple[float, int]] = deque(maxlen=VERSIONS)
        self._eta: int | None = None
        self._sample_s: float | None = None

    def view(self, reading: Reading, totals: Totals, now: float) -> PoolView:
        """The pool now. totals: with this reading taken in. now: on a monotonic clock."""
        pool, alive = reading.pool, reading.pool.alive
        serving = [worker for worker in alive if worker.state in SERVING]
        running, slots = sum(one.running for one in serving), sum(one.max_running for one in serving)
        self._measure(totals, now, PoolView(at=now, running=running, slots=slots, serving=len(serving)))
        if not self._versions or pool.committed != self._versions[-1][1]:
            self._versions.append((now, pool.committed))
        made_bytes = pool.load.unread_bytes + pool.load.taken_bytes
        self._results.append((now, made_bytes, pool.load.taken_bytes, totals.tokens))
        taken_tokens_per_s, unread_s = self._taken(now, pool.load.unread_bytes)
        held_back = min(reading.queued_samples, reading.held_back_samples)
        if reading.queued_samples > 0:
            self._eta = reading.max_staleness
        elif not pool.load.open_jobs and not self._trains(now):
            self._eta = None
        seconds = sum(it[0] for it in self._window)
        view = PoolView(
            at=now,
            queued=reading.queued_samples - held_back,
            held_back=held_back,
            running=float(running),
            slots=float(slots),
            serving=len(serving),
            starting=sum(worker.state in STARTING for worker in alive),
            draining=sum(worker.state == "draining" for worker in alive),
            paused=sum(worker.state == "paused" for worker in alive),
            tokens_per_s=sum(it[1] for it in self._window) / seconds if seconds else _told(serving),
            worker_tokens_per_s=self._worker_rate(serving),
            tokens_per_sample=totals.tokens_per_sample,
            sample_s=self._sample_s,
            version_s=self._version_s(),
            eta=self._eta,
            taken_tokens_per_s=taken_tokens_per_s,
            unread_s=unread_s,
        )
        self._last = view
        return view

    def _measure(self, totals: Totals, now: float, pool: PoolView) -> None:
        last, (tokens, samples) = self._last, self._before
        self._before = totals.tokens, totals.samples
        if last is None or (seconds := now - last.at) <= 0:
            return
        running_s = seconds * (last.running + pool.running) / 2
        self._window.append((seconds, totals.tokens - tokens, totals.samples - samples, running_s))
        while len(self._window) > 1 and sum(it[0] for it in self._window) - self._window[0][0] >= WINDOW_S:
            self._window.popleft()
        if ended := sum(it[2] for it in self._window):
            self._sample_s = sum(it[3] for it in self._window) / ended  # Little's law
        if last.is_full and pool.is_full:
            worker_s = seconds * (pool.serving + last.serving) / 2
            fades = 0.5 ** (worker_s / WORKER_S)
            self._full_s = self._full_s * fades + worker_s
            self._full_tokens = self._full_tokens * fades + totals.tokens - tokens

    def _worker_rate(self, serving: list[WorkerStatus]) -> float | None:
        if self._full_tokens > 0:
            return self._full_tokens / self._full_s
        full = [one for one in serving if one.running >= FULL * one.max_running]
        if full and (told := _told(full)) > 0:
            return told / len(full)
        return None

    def _version_s(self) -> float | None:
        """Seconds between two versions. The first one seen may be old, so two changes are needed."""
        if len(self._versions) < 3:
            return None
        (first, low), (last, high) = self._versions[1], self._versions[-1]
        return (last - first) / (high - low) if high > low else None

    def _taken(self, now: float, unread: int) -> tuple[float | None, float | None]:
        """Tokens a second that the clients acknowledge, and in how many seconds they would take what is unread.

        Trainers take a whole batch at once, so it is measured over several of their versions. None: not known.
        """
        window_s = min(LONGEST_S, max(WINDOW_S, BATCHES * (self._version_s() or 0.0)))
        while len(self._results) > 2 and now - self._results[1][0] >= window_s:
            self._results.popleft()
        first, last = self._results[0], self._results[-1]
        seconds, made, taken, tokens = (after - before for before, after in zip(first, last, strict=True))
        if seconds < window_s / 2 or made < 0 or taken < 0:  # too short; or Redis has lost its data
            return None, None
        per_byte = tokens / made if made else 0.0
        return taken * per_byte / seconds, unread * seconds / taken if taken else None

    def _trains(self, now: float) -> bool:
        """Whether the trainer published lately, by its own measure."""
        return (pace := self._version_s()) is not None and now - self._versions[-1][0] <= 4 * pace


def _told(workers: list[WorkerStatus]) -> float:
    """Tokens a second, as the heartbeats say it."""
    return sum(min(worker.tokens_per_s, 1e7) for worker in workers)


class PoolWatch:
    """Looks at a pool again and again, for the exporter and for who scales it.

    workers: the living workers as of the last look that succeeded. totals: what has happened since the first one.
    """

    def __init__(self, redis: PoolRedis, pool: str) -> None:
        self._reader, self._demand = PoolReader(redis, pool), Demand()
        self.totals = Totals()
        self.workers: tuple[WorkerStatus, ...] = ()
        self._away = False

    async def read(self) -> tuple[Reading, PoolView]:
        """The pool now. Raises TimeoutError, and what `PoolReader.read` raises."""
        async with asyncio.timeout(PATIENCE_S):
            reading = await self._reader.read()
        now = time.monotonic()
        self.totals.take_in(reading, now)
        view = self._demand.view(reading, self.totals, now)
        self.workers = tuple(reading.pool.alive)
        return reading, view

    async def look(self) -> PoolView | None:
        """The pool now; None if it could not be read, which the log says once until it can be read again."""
        try:
            _, view = await self.read()
        except Exception as error:  # whatever it is: who scales waits for the next look
            if not self._away:
                log.warning("the pool cannot be read: %s: %s", type(error).__name__, error)
            self._away = True
            return None
        if self._away:
            log.info("the pool can be read again")
            self._away = False
        return view
