"""Refuses jobs that no worker of the pool can run, before they are sent."""

from __future__ import annotations

import time
from collections.abc import Iterable

from redis.exceptions import NoPermissionError

from ...messages.broker import Broker
from ...messages.codec import Job
from ...messages.errors import FeatureUnavailable
from ...messages.model import WorkerStatus

FRESH_S = 1.0
"""So often, in seconds, Redis is asked whether workers have joined or left."""
OLD_S = 60.0
"""Age in seconds at which what the workers have is read again in any case."""


class FeatureCheck:
    """Refuses jobs that no worker of the pool could run.

    Refuses nothing where no worker is known: in a pool without workers (others may come), and where this Redis user may
    not list them. A job that uses no optional part costs no question to Redis. Any other costs one small question a
    second; what the workers have is read again when one has joined or left.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._workers: list[WorkerStatus] = []
        self._asked_at = self._read_at = float("-inf")
        self._roster = 0

    async def check(self, jobs: Iterable[Job]) -> None:
        """Raises FeatureUnavailable for the first job that nobody can run."""
        for job in jobs:
            if uses := job.features_used():
                await self.workers()
                self._check(job, frozenset(uses))

    async def workers(self) -> list[WorkerStatus]:
        """The pool's workers, as of the last time that one joined or left, or of a minute ago. Empty where this Redis
        user may not list them."""
        now = time.monotonic()
        if now - self._asked_at < FRESH_S:
            return self._workers
        try:
            roster = await self._broker.roster()
            if roster != self._roster or now - self._read_at >= OLD_S:
                self._workers = await self._broker.workers()
                self._read_at, self._roster = now, roster
            self._asked_at = now
        except NoPermissionError:  # some trainers may not list workers; then the workers refuse
            self._asked_at = float("inf")
        return self._workers

    def _check(self, job: Job, uses: frozenset[str]) -> None:
        lacks = [(worker, uses - set(worker.features)) for worker in self._workers]
        if not lacks or not all(missing for _, missing in lacks):
            return
        # The worker that lacks least makes the clearest error.
        _, missing = min(lacks, key=lambda pair: len(pair[1]))
        name = min(missing)
        versions = sorted({worker.engine for worker, without in lacks if name in without})
        raise FeatureUnavailable(
            name, job.value_of(name), f"nothing: no worker of this pool honours it ({', '.join(versions)})"
        )
