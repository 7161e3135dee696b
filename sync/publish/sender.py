"""The trainer's publications: each is announced, offered, and followed until every worker has it or is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.errors import WeightSyncError
from ...messages.model import WeightAnnouncement
from ...messages.redis import Bell, Ring
from ..tensors import Snapshot
from ..transfer import (
    Ledger,
    SyncSettings,
    TransferReport,
    VersionHolder,
    offers_no_more,
    parts_of,
    read_report,
    through_outage,
)
from .again import is_known
from .handle import Phase, Publication, PublishProgress, PublishReport, State
from .hub import Hub, Outgoing

log = logging.getLogger(__name__)
GRACE_S = 2.0
"""Seconds that a worker's report may come after its own deadline."""
GLANCE_S = 1.0
"""Seconds between looks at the ledger whether the workers that it waits for are alive."""
PROBE_S = 0.3
"""Seconds between questions to those that have joined whether they are alive."""
REJOIN_S = 0.8
"""Seconds in which a worker whose connection broke may come again before it counts as lost."""
CLOSE_S = 30.0
LATEST_S = 600.0
"""A worker that takes a version later does so within this time."""
COSTLY = "cost it the caches of what runs and may take a quarter of its time; with 'in_place' or 'auto' none is lost"
SPARING = "may take 2% of its time if nobody waits for them"
"""Why a worker takes a version later."""
MOST = 2
"""Publications that are followed at the same time. The oldest one is given its report when another one begins."""


@dataclass(slots=True)
class Run:
    """A publication under way. over: why it is not followed to its end. stopped: why it was given up.

    committed: whether it is the pool's, or will be when the first worker comes. failures: worker -> what went wrong.
    superseded: no worker could take it yet, and there is a newer one.

    expected: the workers that were alive when it began. seen: those that have been since. dead: those that are not now.
    later: those that take it later, and when. began: on time.monotonic(), like all times here.
    """

    order: Publication
    told: WeightAnnouncement
    outgoing: Outgoing
    expected: set[str]
    seen: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    later: dict[str, float] = field(default_factory=dict)
    superseded: bool = False
    began: float = field(default_factory=time.monotonic)
    reports: dict[str, TransferReport] = field(default_factory=dict)
    over: str = ""
    stopped: str = ""
    committed: bool = False
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def served(self) -> tuple[str, ...]:
        """The workers that have the version."""
        return tuple(sorted(worker for worker, report in self.reports.items() if report.ok))

    @property
    def postponed(self) -> bool:
        """Whether nobody takes it yet, and somebody will."""
        return bool(self.later) and not self.outgoing.joined

    def report(self) -> PublishReport:
        """What became of it."""
        workers, aborted = self.served, bool(self.order.handle.aborted)
        lost: State = "aborted" if aborted else "superseded" if self.superseded else "failed"
        return self.order.report(
            "committed" if self.committed else lost,
            workers=workers,
            failures=self.failures,
            nbytes=self.outgoing.snapshot.manifest.nbytes,
            readback=bool(workers) and all(self.reports[worker].readback for worker in workers),
        )


class Sender:
    """Sends versions to a pool's workers. Offers the last committed ones to those that come late."""

    def __init__(self, redis: Redis, blocking: Redis, pool: str, host: str, settings: SyncSettings) -> None:
        """blocking: a connection for commands that wait. host: address under which workers reach this host."""
        self._settings = settings
        self._ledger = Ledger(redis, pool)
        self._bell = Bell(blocking, pool, transfers=True)
        self._loop = asyncio.get_running_loop()
        timeout_s = settings.transfer_timeout_s
        self._hub = Hub(host, settings.port, self.nudge, gpu_direct=settings.gpu_direct, timeout_s=timeout_s)
        self._offered: dict[str, list[Outgoing]] = {}  # by adapter, "" for the weights; the last one is the newest
        self._runs: dict[int, Run] = {}
        self._listening: asyncio.Task[None] | None = None
        self._said_later = False
        self._held: set[str] = set()  # workers that keep their version

    async def open(self) -> dict[str, int]:
        """Start to listen. Returns name -> newest version, committed or not; the weights' name is ""."""
        await self._bell.open()
        self._listening = asyncio.create_task(self._bell.listen(self._on_ring))
        return await self._ledger.newest()

    async def close(self) -> None:
        """Offer nothing more, and stop listening."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        newest = next((one for one in reversed(self._offered.get("", ())) if one.committed), None)
        if newest is not None:
            with contextlib.suppress(RedisError, OSError):
                version = newest.snapshot.manifest.version
                await offers_no_more(self._ledger, VersionHolder(version, self._hub.address, newest.token))
        self._offered.clear()  # their memory, before Python finds the cycle: a trainer may open another publisher
        await asyncio.to_thread(self._hub.close)

    def poke(self) -> None:
        """Let everything that waits look again. Call it on the sender's loop."""
        self._bell.ring_here()

    async def until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true. It is checked after each `poke`, and whenever something happens."""
        while True:
            self._bell.quiet()
            if ready():
                return
            await self._bell.wait(float("inf"), GLANCE_S)

    @property
    def free(self) -> bool:
        """Whether a new version may begin.

        Versions commit in order, so the last one has a worker that serves it, or is over, or nobody takes it yet: then
        they may as well take a newer one. And slow workers still receive two versions at most: a trainer keeps two
        beside the one that it sends.
        """
        self._tidy()
        slow = sum(bool(each.receiving) for each in self._offered.get("", ()))
        return all(run.served or run.postponed for run in self._runs.values()) and slow <= MOST

    def progress(self, version: int, total_bytes: int) -> PublishProgress:
        """Return how far a version is. Any thread may call it."""
        run = next((run for run in list(self._runs.values()) if run.told.version == version), None)
        if run is None:
            return PublishProgress("announced", 0, total_bytes)
        joined = tuple(sorted(run.outgoing.joined))
        phase: Phase = "sending" if joined else "announced"
        return PublishProgress(phase, min(run.outgoing.offer.sent_bytes, total_bytes), total_bytes, joined)

    def stop(self, version: int, why: str) -> None:
        """Give a version of the weights up. Workers that have not loaded it do not. Call it on the sender's loop."""
        for run in self._runs.values():
            if run.told.version == version and not run.told.adapter:
                run.stopped = why
        self.poke()

    async def send(self, snapshot: Snapshot, order: Publication, begun: Callable[[], None]) -> PublishReport:
        """Publish a version. Returns when every worker has it, does not take it, or is lost.

        begun(): called once it is announced, when `free` says whether the next one may begin.
        """
        adapter, aborted = order.adapter, order.handle.aborted
        ledger, settings, snapshots = self._ledger, self._settings, self._offered.setdefault(adapter, [])
        alive = await ledger.live_workers()
        self._held &= alive
        expected = alive - self._held
        if aborted:
            return order.report("aborted", failures=dict.fromkeys(expected, aborted), nbytes=snapshot.manifest.nbytes)
        await self._replace(snapshot.manifest.version, adapter)
        epoch = await ledger.new_epoch()
        self._tidy(MOST)
        outgoing = await asyncio.to_thread(self._hub.offer, snapshot, expected, order.config if adapter else None)
        host, port = parts_of(self._hub.address)
        # A field that is not set is not encoded.
        said = settings.announced() | ({"mode": "resume", "adapter": adapter} if adapter else {})
        if order.handle.awaited:
            said["awaited"] = True
        told = WeightAnnouncement(
            version=snapshot.manifest.version,
            epoch=epoch,
            host=host,
            port=int(port),
            token=outgoing.token,
            digest=snapshot.manifest.fingerprint,
            **said,
        )
        run = Run(order, told, outgoing, set(expected), stopped=order.handle.aborted)
        for older in list(self._runs.values())[: max(0, len(self._runs) + 1 - MOST)]:
            older.over = f"had not reported when version {told.version} was published"
        self._runs[epoch] = run
        snapshots.append(outgoing)
        try:
            await ledger.announce(told)
            begun()
            await self._follow(run)
            await self._close(run)
            outgoing.committed = outgoing.sources.late = run.committed
        except BaseException:
            outgoing.committed = False
            raise
        finally:
            del self._runs[epoch]
            if not outgoing.committed:
                with contextlib.suppress(ValueError):
                    snapshots.remove(outgoing)
                await asyncio.to_thread(self._hub.withdraw, outgoing, run.stopped or "no worker could take it")
            self._tidy()
            self.poke()
        if run.failures and (run.committed or not run.superseded):
            log.warning("%s: %s", order.name, run.failures)
        return run.report()

    async def has_offered(self, snapshot: Snapshot) -> bool:
        """Whether the pool has had these weights under their number. If they are the committed ones, workers that come
        late get them from here. Raises WeightSyncError if it had others."""
        known, newest = await is_known(self._ledger, snapshot)
        if newest:
            outgoing = await asyncio.to_thread(self._hub.offer, snapshot, frozenset())
            outgoing.committed = outgoing.sources.late = True
            self._offered.setdefault("", []).append(outgoing)
            self._tidy()
            holder = VersionHolder(snapshot.manifest.version, self._hub.address, outgoing.token)
            await self._ledger.holds("", holder)
        return known

    async def _replace(self, version: int, adapter: str) -> None:
        """Give up what nobody has begun to take, and let go of its memory before there is more."""
        older = {epoch for epoch, run in self._runs.items() if run.postponed and run.told.adapter == adapter}
        for epoch in older:
            self._runs[epoch].over, self._runs[epoch].superseded = f"takes version {version} instead", True
        if older:
            self.poke()
            await self.until(lambda: older.isdisjoint(self._runs))

    async def _close(self, run: Run) -> None:
        """Workers may serve the version by now. So the result is written even if Redis is away for a while."""
        holder = VersionHolder(run.told.version, self._hub.address, run.told.token)
        lost = {worker: why for worker, why in run.failures.items() if worker not in run.reports}
        close = partial(self._ledger.close, run.told, run.committed, holder, lost)
        if await through_outage(close, time.monotonic() + CLOSE_S) and not run.committed:
            run.committed = True  # a worker has reported it meanwhile

    async def _follow(self, run: Run) -> None:
        """Wait until every worker has reported or is lost, or the time is over."""
        order, told, now = run.order, run.told, time.monotonic()
        silent_until, deadline = now + told.join_timeout_s, now + told.deadline_s + GRACE_S
        looked, probed, said = now, now, False
        while True:
            self._bell.quiet()
            now = time.monotonic()
            run.stopped = run.stopped or order.handle.aborted
            if run.served:
                run.outgoing.committed = True
                order.tell_committed(run.served)
            if now - looked >= GLANCE_S:
                looked = now
                await self._look(run, deadline)
            if run.stopped and not said:  # whoever waits for its requests to end stops that
                said, deadline = True, min(deadline, now + GRACE_S)
                await asyncio.to_thread(self._hub.withdraw, run.outgoing, run.stopped)
                await self._ledger.close(told, bool(run.served), None, {})
            if run.later and order.handle.awaited and not run.told.awaited:
                await self._hasten(run)
            if run.later and not run.stopped:
                deadline = max(deadline, max(run.later.values()) + told.deadline_s + GRACE_S)
            waits = {worker for worker in self._concerned(run) if not self._why_not(run, worker, silent_until)}
            if not waits or now >= deadline or run.over:
                break
            if now - probed >= PROBE_S:
                probed = now
                await asyncio.to_thread(self._hub.probe, waits)
            await self._bell.wait(deadline, PROBE_S)
        if self._concerned(run) - run.reports.keys():  # a report may have come that the bell did not bring
            await self._look(run, deadline)
        run.failures = {worker: self._why(run, worker, silent_until) for worker in self._concerned(run)}
        run.committed = bool(run.served) or not run.failures

    async def _hasten(self, run: Run) -> None:
        """Tell the workers that somebody waits for this version. Those that spare their time take it sooner."""
        told = run.told.model_copy(update={"awaited": True})
        with contextlib.suppress(RedisError, OSError):  # it is tried again
            if told.epoch == max(self._runs):  # they take a newer one instead, and hear whether it is waited for
                await self._ledger.announce(told)
            run.told = told

    def _concerned(self, run: Run) -> set[str]:
        """The workers that have not said that they have the version."""
        return (run.expected | run.outgoing.joined | run.reports.keys()) - set(run.served) - self._held

    def _why_not(self, run: Run, worker: str, silent_until: float) -> str:
        """Why there is nothing to wait for at a worker; "" if there is."""
        if (report := run.reports.get(worker)) is not None:
            return f"{report.phase}: {report.error}"
        now, (why, since) = time.monotonic(), self._hub.lost(worker)
        if why and now - max(since, run.began) > REJOIN_S:  # it may have left for another trainer
            return why
        if worker in run.dead:
            return "was lost: its lease is over"
        if (newer := self._newer(run, worker)) is not None:
            return f"went on to version {newer}"
        if worker in run.outgoing.joined:
            return ""
        silent_until = max(silent_until, run.later.get(worker, 0.0) + run.told.join_timeout_s)
        return run.stopped or ("did not answer the announcement in time" if now >= silent_until else "")

    def _newer(self, run: Run, worker: str) -> int | None:
        """Return the newer version that a worker has begun to take, which it does when it is done with this one."""
        for other in self._runs.values():
            later = other.told.epoch > run.told.epoch and other.told.adapter == run.told.adapter
            if later and worker in other.outgoing.joined:
                return other.told.version
        return None

    def _why(self, run: Run, worker: str, silent_until: float) -> str:
        why = self._why_not(run, worker, silent_until)
        return why or run.stopped or run.over or "did not report in time"

    async def _look(self, run: Run, deadline: float) -> None:
        """Read who is alive, and the reports. Waits while Redis is away."""

        async def look() -> set[str]:
            epoch = await self._ledger.epoch(run.told.epoch)
            if epoch is None:
                raise WeightSyncError(f"transfer {run.told.epoch} vanished from the ledger: was Redis emptied?")
            run.reports |= epoch.reports
            self._held |= {worker for worker, report in epoch.reports.items() if report.phase == "held"}
            return await self._ledger.live_workers()

        alive = await through_outage(look, deadline)
        run.seen |= alive
        run.dead = (run.expected | run.seen) - alive

    def _tidy(self, most: int = MOST + 1) -> None:
        """Withdraw what nobody needs: versions before the newest committed one that nobody is receiving.

        most: to keep of each name. Of more than that the newest one goes too: workers have it.
        """
        for offered in self._offered.values():
            newest = max((at for at, each in enumerate(offered) if each.committed), default=0)
            for old in [each for each in offered[: newest + (len(offered) > most)] if not each.receiving]:
                offered.remove(old)
                self._hub.withdraw(old, "there is a newer version")

    def _on_ring(self, ring: Ring) -> None:
        epoch, worker = ring.get("epoch", ""), ring.get("worker", "")
        run = self._runs.get(int(epoch)) if epoch.isdecimal() else None
        if run is None or not worker:
            return
        if "later" in ring:
            self._comes_later(run, worker, ring["later"])
        else:
            run.reports[worker] = report = read_report(ring.get("report", ""))
            if report.phase == "held":
                self._held.add(worker)

    def _comes_later(self, run: Run, worker: str, said: str) -> None:
        with contextlib.suppress(ValueError):
            seconds = min(max(0.0, float(said)), LATEST_S)
            run.later[worker] = time.monotonic() + seconds
            if not self._said_later:
                self._said_later = True
                log.warning(
                    "version %s: worker %s takes it in %.1f s, because updates %s (said once)",
                    run.told.version,
                    worker,
                    seconds,
                    SPARING if run.told.mode == "auto" else COSTLY,
                )
            self.poke()

    def nudge(self) -> None:
        """Let everything that waits look again. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.poke)
