"""Jobs that leave a worker unfinished: released with their partials, tried on another worker, or dead-lettered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from redis.exceptions import RedisError

from ...messages.broker import Claim, Lease, Release, broker_of
from ...messages.redis import name_once
from ..engine import Generated
from ..jobs import HeldJob, HeldJobs
from .batches import batches, each, is_about_data

log = logging.getLogger(__name__)
RETRY_S = 0.2
LONGEST_S = 10.0


class Handback:
    """Hands back the jobs of one worker.

    current(): the lease that the worker holds now; an older lease has lost its jobs.
    """

    def __init__(self, held: HeldJobs, max_lost: int, host: str, current: Callable[[], Lease | None]) -> None:
        self._held, self._max_lost, self._host = held, max_lost, host
        self._current = current
        self._telling: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()  # what a release under way is about
        self._trying: set[tuple[str, int]] = set()
        self._strays: dict[int, frozenset[str]] = {}  # by shard

    async def settled(self) -> None:
        """Return when Redis has been told of everything so far."""
        await asyncio.gather(*self._telling)

    async def release(
        self,
        lease: Lease,
        jobs: list[HeldJob],
        lost: bool = False,
        progress: Callable[[str, int], Generated | None] | None = None,
    ) -> None:
        """Give jobs back now. Raises RedisError or OSError; jobs that Redis was not told of it takes with the lease.

        progress: of samples that still run, see HeldJob.release.
        """
        releases = [held.release(lost, progress) for held in jobs]
        ids = {held.id for held in jobs}
        self._leaving |= ids
        try:
            for held in jobs:
                self._held.drop(held.id)
            await self._send(lease, releases)
        finally:
            self._leaving -= ids

    async def hand_over(self, lease: Lease, jobs: list[HeldJob], taker: str) -> None:
        """Move held jobs, of which nothing runs, to another worker. Those that it does not get stay here.

        Raises RedisError or OSError; then some may have been moved.
        """
        await self._send(lease, [release for held in jobs if held.is_all_in(release := held.release())], taker)

    async def release_claims(self, lease: Lease, claims: list[Claim]) -> None:
        """Give back jobs that were claimed and not begun."""
        await self._send(lease, [Release(claim.job_id, claim.attempt) for claim in claims])

    async def release_all(self, busy: set[str]) -> None:
        """Give back every held job but those in `busy`, as `release` does."""
        if (lease := self._current()) is not None:
            await self.release(lease, [held for held in self._held if held.id not in busy])

    async def cancel_all(self, cause: str) -> int:
        """Cancel every held job, and return how many there were. Raises RedisError or OSError."""
        if (lease := self._current()) is None:
            return 0
        ids = [held.id for held in self._held]
        states = await broker_of(lease.redis, lease.keys.pool).cancel(ids, cause)
        for job_id in ids:
            self._held.drop(job_id)
        return states.count("ok")

    async def stop_all(self) -> list[HeldJob]:
        """Mark every held job as one that ends with what it has, see Broker.stop. Raises RedisError or OSError."""
        jobs, lease = list(self._held), self._current()
        if lease is not None:
            await broker_of(lease.redis, lease.keys.pool).stop([held.id for held in jobs])
        return jobs

    async def disown(self, lease: Lease, too_many: bool, known: Callable[[], set[str] | None]) -> None:
        """Give back strays: jobs that Redis has under this worker's name and the worker does not know.

        A failover of Redis can undo a publication or a hand-back. Nobody else would ever get such a job while this
        worker renews its lease. A job is a stray when two heartbeats in a row have found it.

        too_many: whether the heartbeat counted more jobs than the worker holds. known(): the ids of jobs that the
        worker knows, or None while a claim is under way.
        """
        found = await lease.held() if too_many else frozenset()
        mine = known()
        if not found or mine is None or self._telling:
            self._strays.pop(lease.keys.shard, None)
            return
        before, now = self._strays.get(lease.keys.shard, frozenset()), found - mine - self._leaving
        self._strays[lease.keys.shard] = now
        if strays := now & before:
            log.warning("%d jobs are held here that nobody works on: giving them back", len(strays))
            attempts = await lease.attempts(sorted(strays))
            await self._send(lease, [Release(job_id, attempt) for job_id, attempt in attempts.items()])

    async def _send(self, lease: Lease, releases: list[Release], to: str = "") -> None:
        async def send(batch: list[Release]) -> None:
            states = await lease.release(batch, self._max_lost, to)
            for release, state in zip(batch, states, strict=True):
                if state != "kept":
                    self._held.drop(release.job_id, release.attempt)

        for batch in batches(releases, _bytes):
            await each(batch, send, _stays)

    def try_elsewhere(
        self, lease: Lease, held: HeldJob, ready: Callable[[str], Awaitable[None]], *, lost: bool = True
    ) -> None:
        """Let another worker try a job that failed here, or with lost=False cannot go on here.

        `ready` returns when its finished samples are published.
        """
        if (held.id, held.claim.attempt) not in self._trying:  # by another one of its samples
            self._trying.add((held.id, held.claim.attempt))
            self._aside(self._try_elsewhere(lease, held, ready, lost))

    async def _try_elsewhere(
        self, lease: Lease, held: HeldJob, ready: Callable[[str], Awaitable[None]], lost: bool
    ) -> None:
        try:
            await ready(held.id)
            if self._held.get(held.id, held.claim.attempt) is held:
                release = held.release(lost)
                self._held.drop(held.id)
                await self._insist(lease, lambda: lease.release([release], self._max_lost))
        finally:
            self._trying.discard((held.id, held.claim.attempt))

    def bury(self, job_id: str, attempt: int, cause: str, error: Exception) -> None:
        """Forget a job that no worker can run, and dead-letter it."""
        self._held.drop(job_id)
        log.warning("job %s is %s: %s", job_id, cause, error)
        lease, text = self._current(), f"{type(error).__name__}: {error}"
        assert lease is not None
        self._aside(self._insist(lease, lambda: lease.bury(job_id, attempt, cause, self._host, text)))

    async def _insist(self, lease: Lease, tell: Callable[[], Awaitable[object]]) -> None:
        """Tell Redis about a job that left this worker, again and again until it answers.

        Otherwise nobody would get the job while this worker renews its lease. A lost lease takes the job along.
        """
        pause_s = RETRY_S
        while lease is self._current():
            try:
                await tell()
            except (RedisError, OSError) as error:
                if is_about_data(error):  # what is in its way may be there for long
                    name_once(str(error))
                    pause_s = min(2 * pause_s, LONGEST_S)
                await asyncio.sleep(pause_s)
            else:
                return

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


def _stays(release: Release, error: Exception) -> None:
    log.warning("job %s cannot be given back: %s", release.job_id, error)


def _bytes(release: Release) -> int:
    return sum(len(piece.payload) for piece in release.pieces)
