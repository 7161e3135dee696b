"""Follows the ledger for a worker: joins transfers, lets the engine receive, verify and load versions, and reports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ...messages import tracing
from ...messages.errors import EngineDead, EngineError, InvalidField, MessageError, TransferTimeout
from ...messages.model import WeightAnnouncement
from ...messages.redis import name_once
from ...sync.transfer import Epoch, Join, Ledger, TransferOrder, TransferReport, through_outage
from ..engine import Engine
from ..gate import Gate, WeightsTurn, set_within
from ..generation import Generation
from ..journaling import WorkerJournal
from .adapter_follower import AdapterFollower
from .catch_up import CatchUp, Preparing
from .quarantine import Quarantine
from .snapshots import Snapshots

log = logging.getLogger(__name__)
SEAL_GRACE_S = 2.0
"""Seconds that a worker waits for the seal beyond the trainer's own join deadline."""
STUCK_S = 30.0
"""Seconds after which an engine whose answer is late counts as stuck."""
REPORT_S = 30.0
LOOK_S = 1.0
"""Seconds between looks at the ledger when nobody pokes."""
SETTLED_LOOK_S = 10.0
"""The same for a worker that lacks nothing: each heartbeat tells it of a new version and of a transfer."""
SAY_S = 30.0
"""Seconds between log lines of a worker that waits for weights."""


class WeightFollower:
    """Follows the ledger for one worker.

    on_stuck(): called if the engine does not answer, or has weights that are neither old nor new and nothing mends
    them. in_service: False until the worker has verified the newest version that was committed when it joined.
    adapters: follows the pool's LoRA adapters, which have transfers of their own. quarantined: whether a load broke off
    midway. The engine generates nothing until a whole version has arrived or, after
        QUARANTINE_S without one, until it has been restarted.
    snapshots: where to look for the committed version before asking anybody for it.
    gate: while anybody holds it, nothing is joined, read or asked for, so the engine's weights stay as they are.
    turn: an update takes it, and so does everybody else who changes the weights or needs them unchanged.
    give_way: awaited before the engine takes part in an update. It ends what the engine sends to others. It returns
    False
        if the engine still sends.
    """

    give_way: Callable[[str], Awaitable[bool]] | None = None

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        ledger: Ledger,
        on_stuck: Callable[[], None],
        journal: WorkerJournal,
        *,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.in_service = False
        self.updating = False
        self._engine, self._generation, self._ledger = engine, generation, ledger
        self.adapters = AdapterFollower(engine, ledger)
        self._on_stuck, self._journal = on_stuck, journal
        self._catch_up = CatchUp(snapshots, self._begin, self._finish)
        self._said = 0.0
        self._group = ""  # name of the process group that the engine is still in
        self._seen_epoch = 0
        self._halted = False
        self._poked = asyncio.Event()
        self.gate = Gate(self.poke)
        self.turn = WeightsTurn()
        self._quarantine = Quarantine(generation.gate)

    @property
    def quarantined(self) -> bool:
        return self._quarantine.on

    @property
    def lendable(self) -> int:
        """The version that the engine has verified and may send to others; 0 for none."""
        busy = self.turn.locked() or self.updating or self.quarantined
        return self._generation.version if self.in_service and self._may_touch() and not busy else 0

    def _may_touch(self) -> bool:
        return self.gate.is_open and not self._halted

    def poke(self) -> None:
        """Look at the ledger now."""
        self._poked.set()

    def halt(self) -> None:
        """Take part in nothing until `restarted`, because there is no engine."""
        self._halted = True
        self._catch_up.stop()
        self.poke()  # an update under way gives up the turn, which the restart waits for

    def restarted(self) -> None:
        """Note that the engine has its base weights again, version 0, and may be behind. The caller has the turn."""
        self._halted = False
        self._group = ""
        self._generation.version = 0
        self.in_service = False
        self._seen_epoch = 0
        self._quarantine.end()
        self.poke()

    async def run(self, worker_id: str, on_change: Callable[[], None]) -> None:
        """Follow until cancelled. on_change(): called when `in_service` or the version may have changed."""
        asked = 0.0
        while True:
            self._poked.clear()
            wait_s = LOOK_S
            try:
                committed, digest = await self._ledger.committed_digest()
                if not self.in_service and not self.quarantined and self._generation.version >= committed:
                    self.in_service = True
                    on_change()
                number = await self._ledger.open_epoch()
                # Compared for inequality, because the numbers start again in a Redis that lost its data.
                if number and number != self._seen_epoch and await self._look_into(number, worker_id):
                    on_change()
                    continue
                if self._may_touch() and await self._catch_up.look(self._generation.version, committed, digest):
                    await self._ledger.unwant(worker_id)
                    on_change()
                    continue
                may_ask = not self._catch_up.reads and self.gate.is_open
                if may_ask and self._quarantine.overdue and not self._halted:
                    self._on_stuck()
                if may_ask and self._generation.version < committed and time.monotonic() - asked > LOOK_S:
                    asked = time.monotonic()
                    await self._ledger.want(worker_id, self._generation.version)
                    self._say_that_it_waits(committed)
                if self._may_touch():
                    await self.adapters.keep_up(worker_id)
                lacks = not self.in_service or self.quarantined or self._generation.version < committed
                if not lacks and not number and not self.adapters.any:
                    wait_s = SETTLED_LOOK_S
            except (RedisError, OSError, MessageError) as error:
                name_once(f"the weights ledger cannot be read: {error}")
            await set_within(self._poked, wait_s)

    async def _look_into(self, number: int, worker_id: str) -> bool:
        """Take part in a transfer if it concerns this worker. Returns False if the weights may not be touched now."""
        if not self._may_touch():
            return False
        async with self.turn.take("a weight transfer"):
            if not self._may_touch():  # the engine went to sleep, or died, before the turn came
                return False
            before, self._seen_epoch = self._seen_epoch, number
            try:
                await self._take_part(number, worker_id)
            except (RedisError, OSError):
                self._seen_epoch = before  # so that it is tried again: the sender may still wait for this worker
                raise
        return True

    async def _take_part(self, number: int, worker_id: str) -> None:
        epoch = await self._ledger.epoch(number)
        if epoch is not None and epoch.state == "joining" and epoch.announcement.adapter:
            await self._take_adapter(epoch.announcement, worker_id)
            return
        if epoch is None or epoch.state != "joining" or epoch.announcement.version <= self._generation.version:
            return
        if await self._may_load(f"version {epoch.announcement.version} is announced"):
            await self._join_and_load(epoch, number, worker_id)

    async def _take_adapter(self, told: WeightAnnouncement, worker_id: str) -> None:
        """Take part in the transfer of an adapter. It loads while the engine runs."""
        if not self.adapters.concerned(told) or not await self._ledger.join(told.epoch, worker_id, Join(1)):
            return
        sealed = await self._sealed(told.epoch, time.monotonic() + told.join_timeout_s + SEAL_GRACE_S)
        if sealed is not None and worker_id in sealed.announcement.roster:
            report = await self.adapters.take(sealed.announcement)
            self._journal.updated(told.version, report, adapter=told.adapter)
            await self._report(told.epoch, worker_id, report, told.adapter)

    async def _may_load(self, why: str) -> bool:
        may = self.give_way is None or await self.give_way(why)
        if not may:
            log.warning("%s, and this engine still sends to others: it takes no part", why)
        return may

    async def _join_and_load(self, epoch: Epoch, number: int, worker_id: str) -> None:
        announcement, info = epoch.announcement, self._engine.info
        join = Join(info.tp_size, cuda=info.device == "cuda", gpu=info.gpu, group=self._group)
        if not await self._ledger.join(number, worker_id, join):
            return
        sealed = await self._sealed(number, time.monotonic() + announcement.join_timeout_s + SEAL_GRACE_S)
        if sealed is None or worker_id not in sealed.announcement.roster:
            return
        self._catch_up.stop()
        self._journal.announced(sealed.announcement)
        try:
            order = TransferOrder.of_announcement(sealed.announcement, sealed.announcement.roster[worker_id])
            report = await self._receive_and_load(order)
        except (EngineDead, InvalidField) as error:
            report = TransferReport(ok=False, phase="rendezvous", error=str(error))
        in_group = report.ok and sealed.announcement.roster[worker_id] > 0
        self._group = sealed.announcement.group if in_group else ""
        if not report.ok:
            log.warning("version %s was refused in %s: %s", announcement.version, report.phase, report.error)
        await self._report(number, worker_id, report)

    async def _report(self, number: int, worker_id: str, report: TransferReport, adapter: str = "") -> None:
        """Report to the sender, which waits for it. During an outage of Redis it is tried until the deadline."""
        tracing.past("rolloutmq sync", report.seconds, epoch=number, adapter=adapter, ok=report.ok, bytes=report.nbytes)
        tell = partial(self._ledger.report, number, worker_id, report, adapter)
        await through_outage(tell, time.monotonic() + REPORT_S)

    async def _receive_and_load(self, order: TransferOrder) -> TransferReport:
        preparing = self._prepare(order)
        if not await self._first(preparing, order):
            # The engine drops it when it prepares something else.
            return _over("the transfer was over before it was here")
        report = await preparing
        return await self._commit(order) if report.ok else report

    async def _first(self, work: asyncio.Future[Any], order: TransferOrder) -> bool:
        """Wait for `work`. As soon as the ledger is done with the transfer, cancels it and returns False."""
        watching = asyncio.create_task(self._ledger_is_done_with(order))
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        if not work.done():
            work.cancel()
        return work.done()

    async def _ledger_is_done_with(self, order: TransferOrder) -> None:
        """Return when it is. Orders to read from disk have a number below 0 and are not in the ledger."""
        while True:
            self._poked.clear()
            with suppress(RedisError, OSError):
                if order.epoch > 0 and await self._ledger.open_epoch() != order.epoch:
                    return
            await set_within(self._poked, LOOK_S)

    async def _commit(self, order: TransferOrder) -> TransferReport:
        if order.epoch > 0:
            with suppress(RedisError, OSError):  # asked now: nobody waits for Redis while generation stands still
                if await self._ledger.open_epoch() != order.epoch:
                    return _over("the transfer was over before it was loaded")
        async with self._standing_still(order) as why_not:
            if why_not is not None:
                return why_not
            self.updating = True
            try:
                return await self._load(order)
            finally:
                self.updating = False

    async def _load(self, order: TransferOrder) -> TransferReport:
        in_place = order.mode == "in_place" and not self.quarantined
        try:
            report = await self._ask(self._engine.commit_weights(order), order)
        except asyncio.CancelledError:
            self._on_stuck()  # the load continues in the engine: nobody knows what it will hold
            raise
        if report.ok:
            if in_place:
                self._generation.in_flight.switched(order.version, report.switched)
            self.mended(order.version)
        elif not report.intact and in_place:
            self._generation.in_flight.spoiled()
            self._on_stuck()  # it continues to generate with weights that are no version: only its end stops that
        elif not report.intact:
            self.mend(patient=self._quarantine.patient)
        return report

    @asynccontextmanager
    async def _standing_still(self, order: TransferOrder) -> AsyncIterator[TransferReport | None]:
        """Bring generation into the state that the update's mode needs. Yields a report if that was not possible."""
        if order.mode == "in_place" and not self.quarantined:
            async with self._generation.in_flight.switching():
                yield None
        elif order.mode == "drain":
            with self._generation.gate.holder("update"):
                idle = asyncio.create_task(self._generation.in_flight.idle(order.drain_s))
                if not await self._first(idle, order):
                    yield _over("the transfer was over before it was loaded")
                elif idle.result():
                    yield None
                else:
                    late = "what was running did not end in the time the trainer gives"
                    yield TransferReport(ok=False, phase="load", error=late)
        else:
            async with self._generation.in_flight.quiet():
                yield None

    async def _ask(self, half: Coroutine[Any, Any, TransferReport], order: TransferOrder) -> TransferReport:
        """Await half an update. The engine keeps the order's deadline. This later one finds an engine that is stuck."""
        try:
            async with asyncio.timeout(order.timeout_s + STUCK_S):
                report = await half
        except (EngineError, TimeoutError) as error:
            if isinstance(error, EngineDead):
                raise
            self._on_stuck()  # nothing is known about the weights now
            report = TransferReport(ok=False, phase="load", error=f"{type(error).__name__}: {error}", intact=False)
        self._journal.updated(order.version, report, mode=order.mode, transport=order.transport)
        return report

    async def load(self, order: TransferOrder) -> TransferReport:
        """Load what an operator ordered, by both halves of an update. Raises EngineDead."""
        async with self.turn.take(f"the load of version {order.version}"):
            here = self._generation.version
            if not self.gate.is_open:
                return TransferReport(ok=False, phase="load", error=f"the engine is {', '.join(self.gate.reasons)}")
            if not (order.version > here or self.quarantined):  # another version came during the wait for the turn
                return TransferReport(ok=False, phase="load", error=f"version {here} came first")
            self._catch_up.stop()
            if not await self._may_load(f"version {order.version} is to be loaded"):
                return TransferReport(ok=False, phase="load", error="the engine still sends its weights to others")
            report = await self._prepare(order)
            return await self._commit(order) if report.ok else report

    def mend(self, *, patient: bool = False) -> None:
        """Let the engine, whose weights are no version, generate nothing until it has a whole one.

        patient: wait as long as it takes. Otherwise the engine is restarted after QUARANTINE_S.
        """
        self._quarantine.begin(patient=patient)
        self._generation.version = 0
        self.in_service = False
        self.poke()

    def look_again(self) -> None:
        """Compare the engine's version with the pool's before it serves again."""
        self.in_service = False
        self.poke()

    def mended(self, version: int) -> None:
        """Note that the engine has a whole version again."""
        self._generation.version = version
        self.in_service = True
        self._quarantine.end()

    # --- both halves -----------------------------------------------------------------------------------------------

    async def _begin(self, order: TransferOrder, why: str) -> Preparing | None:
        return self._prepare(order) if await self._may_load(why) else None

    async def _finish(self, order: TransferOrder, report: TransferReport) -> TransferReport | None:
        async with self.turn.take(f"the load of version {order.version}"):
            if not self._may_touch() or self._generation.version >= order.version:
                return None
            return await self._commit(order) if report.ok else report

    def _prepare(self, order: TransferOrder) -> Preparing:
        half = asyncio.create_task(self._ask(self._engine.prepare_weights(order), order))
        half.add_done_callback(self._has_prepared)
        return half

    def _has_prepared(self, half: asyncio.Task[TransferReport]) -> None:
        if not half.cancelled():
            half.exception()  # marks it as seen: nobody may be waiting any more
        self.poke()

    def _say_that_it_waits(self, committed: int) -> None:
        if time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            log.info("version %s is committed, this worker has %s and asks for it", committed, self._generation.version)

    # --- small things ----------------------------------------------------------------------------------------------

    async def _sealed(self, number: int, deadline: float) -> Epoch | None:
        """Return the epoch once it is sealed, or None if it closed, vanished or was not sealed in time."""
        while time.monotonic() < deadline and not self._halted:
            self._poked.clear()
            with suppress(RedisError, OSError):  # Redis may come back, and the sender waits for workers that joined
                epoch = await self._ledger.epoch(number)
                if epoch is None or epoch.state == "closed":
                    return None
                if epoch.state == "sealed":
                    return epoch
            await set_within(self._poked, min(LOOK_S, max(0.001, deadline - time.monotonic())))
        return None


def _over(why: str) -> TransferReport:
    """Return the report of a transfer that its sender has ended, or that another one has replaced.

    It may be repeated.
    """
    return TransferReport(ok=False, phase="rendezvous", error=f"{TransferTimeout.__name__}: {why}")
