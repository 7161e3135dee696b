"""Whether anybody in the pool can do what a job asks for: asked before it is sent, and only if it asks for much."""

from __future__ import annotations

import time
from collections.abc import Iterable

from redis.exceptions import NoPermissionError

from ...messages.broker import Broker
from ...messages.codec import Job
from ...messages.errors import FeatureUnavailable
from ...messages.model import WorkerStatus

FRESH_S = 1.0
"""So old the pool's answer may be, in seconds."""


class FeatureCheck:
    """Refuses jobs that no worker of the pool could run.

    A pool without workers refuses nothing: those that come later are not known. Nor does one whose workers this user
    may not see. Jobs that use no optional part cost nothing but a look at them.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._workers: list[WorkerStatus] = []
        self._asked_at = float("-inf")

    async def check(self, jobs: Iterable[Job]) -> None:
        """Raises FeatureUnavailable for the first job that nobody can run; asks Redis at most once a second."""
        for job in jobs:
            if uses := job.features_used():
                await self._refresh()
                self._check(job, frozenset(uses))

    async def _refresh(self) -> None:
        if time.monotonic() - self._asked_at >= FRESH_S:
            try:
                self._workers = await self._broker.workers()
                self._asked_at = time.monotonic()
            except NoPermissionError:  # a trainer's user need not have it: then workers refuse what they cannot do
                self._asked_at = float("inf")

    def _check(self, job: Job, uses: frozenset[str]) -> None:
        lacks = [(worker, uses - set(worker.features)) for worker in self._workers]
        if not lacks or not all(missing for _, missing in lacks):
            return
        # The one that comes nearest says most clearly what is in the way.
        _, missing = min(lacks, key=lambda pair: len(pair[1]))
        name = min(missing)
        versions = sorted({worker.engine for worker, without in lacks if name in without})
        raise FeatureUnavailable(
            name, job.value_of(name), f"nothing: no worker of this pool honours it ({', '.join(versions)})"
        )
