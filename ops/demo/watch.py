"""Watches the demo's pool: a thread looks at queue and workers a few times a second."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Self

from redis import Redis

from ...messages.errors import RolloutMQError, WaitTimeout
from ...messages.model import WorkerStatus
from ...messages.redis import Keys
from ...producer.blocking import BlockingRolloutClient

EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Glance:
    """The pool at one moment. at: time.monotonic() seconds. queued: jobs. workers: by process id."""

    at: float
    queued: int
    workers: dict[int, WorkerStatus]


class Watch:
    """Keeps all glances of a run; may be read from other threads while it grows."""

    def __init__(self, redis_url: str, pool: str) -> None:
        self.glances: list[Glance] = []
        self.error: RolloutMQError | None = None
        self._where = (redis_url, pool)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rolloutmq-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop looking; the glances stay."""
        self._stop.set()
        self._thread.join()

    @property
    def latest(self) -> Glance:
        """The newest glance; an empty one before the first."""
        return self.glances[-1] if self.glances else Glance(time.monotonic(), 0, {})

    def worker(self, pid: int) -> WorkerStatus | None:
        """The newest status a worker had, also if it is gone by now."""
        return next((glance.workers[pid] for glance in reversed(self.glances) if pid in glance.workers), None)

    def ids_of(self, pid: int) -> set[str]:
        """Every id a process has had in the pool: a worker that lost its lease comes back under a new one."""
        return {glance.workers[pid].worker_id for glance in self.glances if pid in glance.workers}

    def held_now(self, pid: int) -> int:
        """Jobs the pool has in a worker's hands at this moment: exact, where a glance is half a second old."""
        url, pool = self._where
        with Redis.from_url(url) as redis:
            return sum(int(redis.scard(Keys(pool).held(worker_id))) for worker_id in self.ids_of(pid))

    def wait_serving(self, pids: set[int], timeout_s: float) -> bool:
        """Whether all of these serve; returns at once when they do, after `timeout_s` when not. Raises what it met."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.error is not None:
                raise self.error
            serving = {pid for pid, status in self.latest.workers.items() if status.state in {"serving", "updating"}}
            if pids <= serving:
                return True
            if self._stop.wait(max(0.0, min(EVERY_S, deadline - time.monotonic()))) or time.monotonic() >= deadline:
                return False

    def _look(self) -> None:
        try:
            with BlockingRolloutClient(*self._where) as client:
                while not self._stop.wait(EVERY_S):
                    load, workers = client.load(), client.workers()
                    by_pid = {status.pid: status for status in workers}
                    self.glances.append(Glance(time.monotonic(), sum(load.queued), by_pid))
        except Exception as error:
            self.error = WaitTimeout(f"the pool cannot be watched: {error}")
