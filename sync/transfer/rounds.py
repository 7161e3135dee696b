"""The steps of one transfer, whoever sends: announce, fix who takes part, send, collect the reports, close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

from redis.exceptions import RedisError

from ...messages.errors import DigestMismatch, TransferTimeout, WeightSyncError
from ...messages.model import WeightAnnouncement
from ...messages.redis import Bell
from .ledger import Epoch, Join, Ledger, through_outage
from .order import SENDER_GONE, TransferReport
from .settings import SyncSettings

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""Seconds that a receiver's report may come after the sender's deadline.

Its own deadline starts when it reads the seal.
"""
GLANCE_S = 1.0
"""Seconds between looks whether the workers that it waits for are alive."""
CLOSE_S = 30.0
ATTEMPTS = 3
"""Most attempts of a transfer. After one that a dead or stuck worker broke it is repeated without that worker."""
LINE_TROUBLE = frozenset({"rendezvous", "receive"})
"""Phases in which a transfer can fail because of another rank."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What became of a transfer.

    workers: ids of those that have the version now. failures: worker id -> what went wrong there. again: those of
    `failures` for which a transfer without the others may succeed. readback: whether all of `workers` compared their
    engines' parameters after the load.
    """

    committed: bool
    workers: tuple[str, ...] = ()
    failures: dict[str, str] = field(default_factory=dict)
    again: frozenset[str] = frozenset()
    readback: bool = False

    def then(self, more: TransferResult, again: AbstractSet[str]) -> TransferResult:
        """Return the result of this transfer and of a repeated one of the same version to `again`."""
        failures = {worker: why for worker, why in self.failures.items() if worker not in again} | more.failures
        read = [each.readback for each in (self, more) if each.workers]
        workers, committed = (*self.workers, *more.workers), self.committed or more.committed
        return TransferResult(committed, workers, failures, more.again, bool(read) and all(read))


class TransferSource(Protocol):
    """One version, in the process that sends it."""

    version: int
    digest: str
    """Digest of the manifest. The ledger keeps it if the version becomes the newest."""

    @property
    def absent(self) -> frozenset[int]:
        """The ranks that the last `send` waited for until its deadline."""

    @property
    def address(self) -> tuple[str, int]:
        """Return host and port under which receivers reach the rendezvous store."""

    async def announce(self, ledger: Ledger, announcement: WeightAnnouncement) -> bool:
        """Open the transfer in the ledger, and put the manifest where receivers find it.

        Returns False if another process should send the version, or nobody needs it any more.
        """

    def by_ipc(self, joins: Mapping[str, Join]) -> set[str]:
        """Return the workers that open the buffers themselves, on the same GPU."""

    def backend(self, joins: Mapping[str, Join]) -> Literal["gloo", "nccl"]:
        """Return the backend that reaches the other workers."""

    def name_group(self, epoch: int, members: Mapping[str, int], joins: Mapping[str, Join]) -> str:
        """Return the name of the process group for this transfer."""

    async def send(self, announcement: WeightAnnouncement, timeout_s: float) -> None:
        """Send the version to the announcement's group. Raises TransferTimeout, also after `give_up`."""

    def give_up(self, why: str) -> None:
        """End the `send` under way."""

    async def clean(self, announcement: WeightAnnouncement) -> None:
        """Delete what was put there for receivers. The transfer is over, or was never announced."""


class Transfer:
    """Carries out one transfer of `source`. adapter: name of the LoRA adapter, "" for the weights."""

    def __init__(
        self, ledger: Ledger, bell: Bell, settings: SyncSettings, source: TransferSource, *, adapter: str = ""
    ) -> None:
        self._ledger, self._bell, self._settings, self._source = ledger, bell, settings, source
        self._adapter = adapter
        self._given_up = self._stopped = ""
        self.roster: tuple[str, ...] = ()
        """Ids of the workers that take part, once that is fixed."""

    def stop(self, why: str) -> None:
        """End it for all workers that have not loaded yet, and still collect the reports. Call it on the same loop."""
        self._stopped = why
        self._source.give_up(why)
        self._bell.ring_here()

    def give_up(self, why: str) -> None:
        """End it. Call it on the same loop."""
        self._given_up = why
        self._source.give_up(why)
        self._bell.ring_here()

    async def run(self, expected: AbstractSet[str], *, catch_up: bool) -> TransferResult | None:
        """Carry it out to its end. Returns None if `source.announce` returned False.

        expected: ids of the workers that it waits for. catch_up: only these take part, because the others have the
        version.
        """
        ledger, source = self._ledger, self._source
        host, port = source.address
        announcement = WeightAnnouncement(
            version=source.version,
            epoch=await ledger.new_epoch(),
            host=host,
            port=port,
            catch_up=catch_up,
            **self._settings.announced(),
        )
        if self._adapter:  # a field that is not set is not encoded
            announcement = announcement.model_copy(update={"adapter": self._adapter})
        self._told = announcement
        try:
            if not await source.announce(ledger, announcement):
                return None
            result = await self._announced(announcement, expected)
        finally:  # nothing of the version may stay in the sender's store
            await source.clean(self._told)
        if result.failures:
            of = f" of adapter {self._adapter}" if self._adapter else ""
            log.warning("version %s%s: %s", announcement.version, of, result.failures)
        return result

    async def _announced(self, announcement: WeightAnnouncement, expected: AbstractSet[str]) -> TransferResult:
        """Fix who takes part, send, collect the reports, close."""
        try:
            result = await self._result(announcement, expected)
        except Exception:
            with contextlib.suppress(RedisError, OSError, WeightSyncError):  # workers that joined wait for the seal
                await self._ledger.close(announcement, committed=False)
            raise
        # Workers may serve the version by now. So the result is written even if Redis is away for a while.
        close = partial(self._ledger.close, announcement, result.committed, self._source.digest)
        await through_outage(close, time.monotonic() + CLOSE_S)
        return result

    async def _result(self, announcement: WeightAnnouncement, expected: AbstractSet[str]) -> TransferResult:
        joins = await self._joins(announcement, expected)
        self._told = announcement = self._seal(announcement, joins)
        self.roster = tuple(announcement.roster)
        await self._ledger.seal(announcement)
        failures = dict.fromkeys(
            expected - joins.keys(),
            self._given_up or self._stopped or "did not answer the announcement in time",
        )
        if joins:
            return await self._carry_out(announcement, failures)
        return TransferResult(committed=not expected, failures=failures)

    def _seal(self, announcement: WeightAnnouncement, joins: dict[str, Join]) -> WeightAnnouncement:
        """Return the announcement with roster, ranks, group and transports."""
        by_ipc = self._source.by_ipc(joins)
        roster, world = dict.fromkeys(sorted(by_ipc), 0), 1
        grouped = {worker: join for worker, join in joins.items() if worker not in by_ipc}
        for worker, join in sorted(grouped.items()):
            roster[worker] = world
            world += join.ranks
        members = {worker: roster[worker] for worker in grouped}
        group = self._source.name_group(announcement.epoch, members, grouped) if grouped else ""
        backend = self._source.backend(grouped)
        return announcement.model_copy(
            update={"roster": roster, "world_size": world, "group": group, "backend": backend}
        )

    async def _carry_out(self, announcement: WeightAnnouncement, failures: dict[str, str]) -> TransferResult:
        timeout_s = announcement.deadline_s
        sending = asyncio.create_task(self._source.send(announcement, timeout_s))
        try:
            return await self._reports(announcement, sending, failures)
        except asyncio.CancelledError:
            self._source.give_up("the sender leaves")
            sending.cancel()
            raise
        finally:
            if not sending.cancelling() and not sending.done():
                self._source.give_up("not every worker came through")
                await asyncio.wait({sending}, timeout=GRACE_S + timeout_s)
            if sending.done() and not sending.cancelled():
                sending.exception()  # marks it as seen: `failures` has it

    async def _joins(self, announcement: WeightAnnouncement, expected: AbstractSet[str]) -> dict[str, Join]:
        """Wait until every expected worker has joined or is dead, or the time is over. Returns those that take part."""
        deadline = time.monotonic() + announcement.join_timeout_s
        while True:
            self._bell.quiet()
            if self._given_up or self._stopped:
                return {}
            epoch, alive = await self._look(announcement.epoch, deadline)
            if not (expected & alive) - epoch.joins.keys() or time.monotonic() >= deadline:
                welcome = alive & expected if announcement.catch_up else alive
                return {worker: join for worker, join in epoch.joins.items() if worker in welcome}
            await self._bell.wait(deadline, GLANCE_S)

    async def _reports(
        self, announcement: WeightAnnouncement, sending: asyncio.Task[None], failures: dict[str, str]
    ) -> TransferResult:
        """Wait until every worker of the roster has reported or is dead, or the time is over. Returns the result."""
        deadline = time.monotonic() + announcement.deadline_s + GRACE_S
        while True:
            self._bell.quiet()
            epoch, alive = await self._look(announcement.epoch, deadline)
            silent = announcement.roster.keys() - epoch.reports.keys()
            stray = sorted(w for w, report in epoch.reports.items() if w in announcement.roster and _has_left(report))
            # The group need not wait for its dead members any longer. A worker without a rank holds up nobody.
            gone = sorted(worker for worker in {*(silent - alive), *stray} if announcement.roster[worker])
            if gone and not sending.done():
                self._source.give_up(f"{', '.join(gone)} died or refused")
            if not silent & alive or time.monotonic() >= deadline or self._given_up:
                break
            await self._bell.wait(deadline, GLANCE_S)
        why = "was lost during the transfer"
        # When all have reported or died, a broadcast that still waits for one of them ends by itself, at its deadline.
        await asyncio.wait({sending}, timeout=0 if silent & alive else GRACE_S)
        if sending.done() and sending.exception() is not None:
            why += f" ({sending.exception()})"
        again, late = set(), self._late(announcement, epoch)
        for worker in announcement.roster:
            report = epoch.reports.get(worker)
            if report is None:
                failures[worker] = self._given_up or why
            elif not report.ok:
                failures[worker] = f"{report.phase}: {report.error}"
                by_ipc = announcement.roster[worker] == 0
                if report.phase in LINE_TROUBLE and (by_ipc or not (_own_fault(report) or worker in late)):
                    again.add(worker)
        workers = tuple(worker for worker in announcement.roster if worker not in failures)
        readback = bool(workers) and all(epoch.reports[worker].readback for worker in workers)
        return TransferResult(bool(workers), workers, failures, frozenset(again), readback)

    def _late(self, announcement: WeightAnnouncement, epoch: Epoch) -> set[str]:
        """Return the workers that the sender waited for in vain. They cannot reach it or are too slow: no retry."""
        late = set()
        for worker, first in announcement.roster.items():
            ranks = epoch.joins[worker].ranks if worker in epoch.joins else 1
            if first and self._source.absent & set(range(first, first + ranks)):
                late.add(worker)
        return late

    async def _look(self, number: int, deadline: float) -> tuple[Epoch, set[str]]:
        """Return the transfer and the workers that are alive. Waits while Redis is away."""

        async def look() -> tuple[Epoch, set[str]]:
            epoch = await self._ledger.epoch(number)
            if epoch is None:
                raise WeightSyncError(f"transfer {number} vanished from the ledger: was Redis emptied?")
            return epoch, await self._ledger.live_workers()

        return await through_outage(look, deadline)


async def repeated(
    ledger: Ledger,
    transfer: Callable[[frozenset[str] | None], Awaitable[TransferResult]],
    only: frozenset[str] | None,
) -> TransferResult:
    """Run `transfer` to `only` these workers, or to all (None). What some of them broke is repeated for the others."""
    result = await transfer(only)
    for _ in range(ATTEMPTS - 1):
        if not (again := result.again & await ledger.live_workers()):
            break
        result = result.then(await transfer(again), again)
    return result


def _own_fault(report: TransferReport) -> bool:
    """Whether it failed before it was in the group, for a reason other than missing members."""
    return not report.ok and report.phase == "rendezvous" and not report.error.startswith(TransferTimeout.__name__)


def _has_left(report: TransferReport) -> bool:
    """Whether it failed by itself before it had received everything. Then the others wait for it in vain."""
    all_here = report.phase == "verify" or (
        report.phase == "receive" and report.error.startswith(DigestMismatch.__name__)
    )
    timed_out = report.error.startswith(TransferTimeout.__name__) and SENDER_GONE not in report.error
    return not report.ok and not all_here and not timed_out
