"""One transfer after the other: announce, settle who takes part, broadcast, hear the reports, close."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ..messages.bell import Bell
from ..messages.codec import encode
from ..messages.errors import WeightSyncError
from ..messages.weights import UpdateMode, WeightAnnouncement
from .group import Group, serve_store
from .ledger import Epoch, Ledger
from .snapshot import Snapshot
from .transfer import Backend

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""A receiver's own deadline starts when it reads the seal; its report may be this much later than the sender's."""
GLANCE_S = 1.0
"""How often a wait on the bell looks whether a worker it waits for is still alive."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a transfer needs to know of its surroundings; see WeightPublisher."""

    redis_url: str
    pool: str
    host: str
    port: int
    mode: UpdateMode
    join_timeout_s: float
    transfer_timeout_s: float
    backend: Backend = "gloo"


@dataclass(frozen=True, slots=True)
class TransferResult:
    """workers: those that have the version now. failures: worker id -> what went wrong there."""

    committed: bool
    workers: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)


class Sender:
    """Sends snapshots to a pool's workers. Keeps the last one for workers that come later."""

    def __init__(self, redis: Redis, blocking: Redis, settings: Settings) -> None:
        self._settings = settings
        self._ledger = Ledger(redis, settings.pool)
        self._bell = Bell(blocking, settings.pool)
        self._retained: Snapshot | None = None
        self._store: Any = None
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> int:
        """Start to listen; returns the pool's newest committed version."""
        self._store = serve_store(self._settings.host, self._settings.port)
        await self._bell.open()
        self._listening = asyncio.create_task(self._bell.listen())
        return await self._ledger.committed()

    async def close(self) -> None:
        """Stop to listen."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._store = None

    def poke(self) -> None:
        """End a `wait_for_work`; to be called on the sender's loop."""
        self._bell.ring_here()

    async def wait_for_work(self, ready: Callable[[], bool]) -> None:
        """Until `ready()` (looked at after each `poke`) or a worker asks for a transfer that can be given."""
        while True:
            self._bell.quiet()
            if ready() or (self._retained is not None and await self._waiting()):
                return
            await self._bell.wait(float("inf"), GLANCE_S)

    async def _waiting(self) -> set[str]:
        """Live workers that ask for a transfer and are behind what is retained."""
        assert self._retained is not None
        version = self._retained.manifest.version
        try:
            wanted = await self._ledger.wanted()
            behind = {worker for worker, has in wanted.items() if has < version}
            return behind & await self._ledger.live_workers() if behind else set()
        except (RedisError, OSError):
            return set()

    async def catch_up(self) -> TransferResult | None:
        """Bring those that ask for it to the retained version; nobody else is disturbed. None if nobody asks."""
        if self._retained is None or not (waiting := await self._waiting()):
            return None
        return await self._transfer(self._retained, frozenset(waiting))

    async def send(self, snapshot: Snapshot) -> TransferResult:
        """Send a new version to every live worker and retain it."""
        self._retained = snapshot
        return await self._transfer(snapshot, None)

    async def _transfer(self, snapshot: Snapshot, only: frozenset[str] | None) -> TransferResult:
        settings, ledger = self._settings, self._ledger
        announcement = WeightAnnouncement(
            version=snapshot.manifest.version,
            epoch=await ledger.new_epoch(),
            mode=settings.mode,
            backend=settings.backend,
            host=settings.host,
            port=self._store.port,
            catch_up=only is not None,
            join_timeout_s=settings.join_timeout_s,
            transfer_timeout_s=settings.transfer_timeout_s,
        )
        expected = await ledger.live_workers() if only is None else only
        await ledger.announce(announcement)
        joins = await self._joins(announcement, expected)
        roster, world = {}, 1
        for worker, ranks in sorted(joins.items()):
            roster[worker] = world
            world += ranks
        announcement = announcement.model_copy(update={"roster": roster, "world_size": world})
        await ledger.seal(announcement)
        failures = dict.fromkeys(expected - roster.keys(), "did not answer the announcement in time")
        result = TransferResult(committed=not expected, failures=failures)
        if roster:
            broadcast = asyncio.create_task(asyncio.to_thread(self._broadcast, snapshot, announcement))
            result = await self._reports(announcement, broadcast, failures)
        await ledger.close(announcement, result.committed)
        if result.failures:
            log.warning("version %s: %s", announcement.version, result.failures)
        return result

    async def _joins(self, announcement: WeightAnnouncement, expected: AbstractSet[str]) -> dict[str, int]:
        """Who takes part: waits until every expected worker has joined, is dead, or the time is over."""
        deadline = time.monotonic() + announcement.join_timeout_s
        while True:
            self._bell.quiet()
            epoch = await self._epoch(announcement.epoch)
            alive = await self._ledger.live_workers()
            if not (expected & alive) - epoch.joins.keys() or time.monotonic() >= deadline:
                return {worker: ranks for worker, ranks in epoch.joins.items() if worker in alive}
            await self._bell.wait(deadline, GLANCE_S)

    def _broadcast(self, snapshot: Snapshot, announcement: WeightAnnouncement) -> None:
        name = f"epoch-{announcement.epoch}"
        self._store.set(f"{name}/manifest", encode(snapshot.manifest))
        group = Group(
            self._store,
            name,
            backend=announcement.backend,
            rank=0,
            world=announcement.world_size,
            host=announcement.host,
            timeout_s=announcement.transfer_timeout_s,
        )
        for bucket in snapshot.buckets:
            group.broadcast(bucket)
        self._store.delete_key(f"{name}/manifest")

    async def _reports(
        self, announcement: WeightAnnouncement, broadcast: asyncio.Task[None], failures: dict[str, str]
    ) -> TransferResult:
        """How it went on each worker of the roster: waits until all have reported, died, or the time is over."""
        deadline = time.monotonic() + announcement.transfer_timeout_s + GRACE_S
        while True:
            self._bell.quiet()
            epoch = await self._epoch(announcement.epoch)
            missing = (announcement.roster.keys() & await self._ledger.live_workers()) - epoch.reports.keys()
            if not missing or time.monotonic() >= deadline:
                break
            await self._bell.wait(deadline, GLANCE_S)
        why = "was lost during the transfer"
        # When all have reported or died, a broadcast that still waits for one of them ends by itself, at its deadline.
        await asyncio.wait({broadcast}, timeout=0 if missing else GRACE_S)
        if broadcast.done() and broadcast.exception() is not None:
            why += f" ({broadcast.exception()})"
        for worker in announcement.roster:
            report = epoch.reports.get(worker)
            if report is None:
                failures[worker] = why
            elif not report.ok:
                failures[worker] = f"{report.phase}: {report.error}"
        workers = tuple(worker for worker in announcement.roster if worker not in failures)
        return TransferResult(bool(workers), workers, failures)

    async def _epoch(self, number: int) -> Epoch:
        epoch = await self._ledger.epoch(number)
        if epoch is None:
            raise WeightSyncError(f"transfer {number} vanished from the ledger: was Redis emptied?")
        return epoch
