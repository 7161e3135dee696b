"""Jobs that leave a worker unfinished: given back with what was generated, given to another worker, or given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import MAX_CALL_TOKENS, Broker, Lease, Release
from ..jobs import HeldJob, HeldJobs

log = logging.getLogger(__name__)
RETRY_S = 0.2
MAX_JOBS = 256


class Handback:
    """What one worker hands back.

    current(): the lease it holds now; with an older one the jobs are gone anyway. drop(job id): hold it no more.
    """

    def __init__(
        self,
        held: HeldJobs,
        max_lost: int,
        host: str,
        current: Callable[[], Lease | None],
        drop: Callable[[str], None],
    ) -> None:
        self._held, self._max_lost, self._host = held, max_lost, host
        self._current, self._drop = current, drop
        self._telling: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()  # what a release under way is about
        self._strays: frozenset[str] = frozenset()

    async def settled(self) -> None:
        """Return once Redis has heard of everything so far."""
        await asyncio.gather(*self._telling)

    async def release(self, lease: Lease, jobs: list[HeldJob], lost: bool = False) -> None:
        """Give jobs back now. Raises RedisError or OSError; what Redis has not heard of it takes with the lease."""
        # The oldest last: each goes to the front of its queue.
        releases = [held.release(lost) for held in sorted(jobs, key=lambda held: held.id, reverse=True)]
        ids = {held.id for held in jobs}
        self._leaving |= ids
        try:
            for held in jobs:
                self._held.drop(held.id)
            for batch in _batches(releases):
                await lease.release(batch, self._max_lost)
        finally:
            self._leaving -= ids

    async def release_all(self, busy: set[str]) -> None:
        """Give back all that is held but `busy`, as `release` does."""
        if (lease := self._current()) is not None:
            await self.release(lease, [held for held in self._held if held.id not in busy])

    async def cancel_all(self, cause: str) -> int:
        """Cancel all that is held; how many jobs. Raises RedisError or OSError."""
        if (lease := self._current()) is None:
            return 0
        ids = [held.id for held in self._held]
        states = await Broker(lease.redis, lease.keys.pool).cancel(ids, cause)
        for job_id in ids:
            self._drop(job_id)
        return states.count("ok")

    async def disown(self, lease: Lease, too_many: bool, known: Callable[[], set[str] | None]) -> None:
        """Give back jobs that Redis has under this worker's name and the worker does not know.

        A failover can take back a publication or a hand-back; nobody else would ever get such a job while this worker
        renews its lease. too_many: whether the heartbeat brought more than the worker has. What is on its way is no
        stray: known() is None while a claim is, and a stray is one that was seen in two heartbeats in a row.
        """
        found = await lease.held() if too_many else frozenset()
        mine = known()
        if not found or mine is None or self._telling:
            self._strays = frozenset()
            return
        before, self._strays = self._strays, found - mine - self._leaving
        if strays := self._strays & before:
            log.warning("%d jobs are held here that nobody works on: giving them back", len(strays))
            attempts = await lease.attempts(sorted(strays))
            for batch in _batches([Release(job_id, attempt) for job_id, attempt in attempts.items()]):
                await lease.release(batch, self._max_lost)

    def try_elsewhere(self, lease: Lease, held: HeldJob, ready: Callable[[str], Awaitable[None]]) -> None:
        """Let another worker try a job that failed here, once `ready` returns: what it finished must be out first."""
        self._aside(self._try_elsewhere(lease, held, ready))

    async def _try_elsewhere(self, lease: Lease, held: HeldJob, ready: Callable[[str], Awaitable[None]]) -> None:
        await ready(held.id)
        if self._held.get(held.id, held.claim.attempt) is held:
            release = held.release(lost=True)
            self._drop(held.id)
            await self._insist(lease, lambda: lease.release([release], self._max_lost))

    def bury(self, lease: Lease, job_id: str, attempt: int, cause: str, error: Exception) -> None:
        """Dead-letter a job that no worker can run."""
        text = f"{type(error).__name__}: {error}"
        self._aside(self._insist(lease, lambda: lease.bury(job_id, attempt, cause, self._host, text)))

    async def _insist(self, lease: Lease, tell: Callable[[], Awaitable[object]]) -> None:
        """Tell Redis about a job that is not held here any more until it has heard: a lease that goes on being renewed
        would keep the job from everybody. A lost lease has taken the job along."""
        while lease is self._current():
            try:
                await tell()
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _batches(releases: list[Release]) -> Iterator[list[Release]]:
    batch: list[Release] = []
    tokens = 0
    for release in releases:
        batch.append(release)
        tokens += sum(len(piece.partial.token_ids) for piece in release.pieces)
        if len(batch) >= MAX_JOBS or tokens >= MAX_CALL_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch
