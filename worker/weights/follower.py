"""Follows the ledger for a worker: lets the engine receive, verify and load versions, and reports."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ...messages import tracing
from ...messages.errors import EngineDead, EngineError, InvalidField, MessageError, TransferTimeout
from ...messages.model import WeightAnnouncement
from ...messages.redis import name_once
from ...sync.transfer import Ledger, TransferOrder, TransferReport, VersionHolder, through_outage
from ..engine import Engine
from ..gate import set_within
from ..generation import Generation
from ..journaling import WorkerJournal
from ..metrics import Vitals
from .adapter_follower import AdapterFollower
from .catch_up import CatchUp, Preparing
from .snapshots import Snapshots

log = logging.getLogger(__name__)
ATTEMPTS = 3
"""Most attempts of a transfer while its sender goes on. What has arrived and was verified is not sent again."""
LINE_TROUBLE = frozenset({"rendezvous", "receive"})
"""Phases in which a transfer can fail because of somebody else."""
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
    them. adapters: follows the pool's LoRA adapters, which have transfers of their own.
    snapshots: where to look for the committed version before asking anybody for it.
    hold: the one version that it takes and keeps, None for the newest that is committed.
    """

    def __init__(
        self,
        engine: Engine,
        generation: Generation,
        ledger: Ledger,
        on_stuck: Callable[[], None],
        *,
        journal: WorkerJournal,
        vitals: Vitals,
        snapshots: Snapshots | None = None,
        hold: int | None = None,
    ) -> None:
        self._state = generation.state
        self._engine, self._generation, self._ledger = engine, generation, ledger
        self.adapters = AdapterFollower(engine, ledger)
        self._on_stuck, self._journal, self._vitals = on_stuck, journal, vitals
        self._hold = hold
        self.catch_up = CatchUp(ledger, snapshots, self._prepare, self._finish, keeps=hold is not None)
        self._said = 0.0
        self._seen_epoch = self._given_up = 0
        self._heard: dict[str, WeightAnnouncement] = {}  # by adapter, "" for the weights
        self._poked = self._state.changed
        self._budget = generation.updates
        self._budget.on_change, self._budget.on_cost = self.poke, journal.update_cost

    def poke(self) -> None:
        """Look at the ledger now."""
        self._poked.set()

    def restarted(self) -> None:
        """Forget what was so of the engine that is gone."""
        self._seen_epoch = 0
        self._budget.forget()

    def hear(self, told: WeightAnnouncement) -> None:
        """Take part in a transfer as soon as possible. A newer one replaces it."""
        self._heard[told.adapter] = told
        self.poke()

    def hear_of_end(self, epoch: int) -> None:
        """Stop what is prepared for a transfer that was given up."""
        self._given_up = epoch
        self.poke()

    def blocks(self) -> dict[str, str]:
        """What of its weights keeps the worker from serving, as `EngineState.blocks`."""
        behind, trouble = self.catch_up.behind, self.catch_up.trouble
        if self._state.dead.is_set() or not (behind or not self._state.in_service):
            return {}
        return {"unavailable" if trouble else "version": behind + (f": {trouble}" if trouble else "") or "it looks"}

    @property
    def warning(self) -> str:
        """The snapshot that it refused, and why, until it has a newer version; "" for none. Others meet it, too."""
        version, told = self.catch_up.refused
        return told if version >= self._state.version else ""

    def beat(self, committed: int, epoch: int) -> None:
        """Look at the ledger if a heartbeat says that there is something."""
        wanted = committed if self._hold is None else self._hold
        if wanted > self._state.version or epoch not in (0, self._seen_epoch):
            self.poke()

    async def run(self, worker_id: str, on_change: Callable[[bool], None]) -> None:
        """Follow until cancelled.

        on_change(waiting): called when the version has changed, or whether it serves. waiting: whether jobs may have
        waited.
        """
        state = self._state
        while True:
            self._poked.clear()
            wait_s = LOOK_S
            if state.dead.is_set():
                self.catch_up.stop()
            try:
                told = self._heard.pop("", None) or (self._heard.popitem()[1] if self._heard else None)
                took = told is not None and await self._look_into(told, worker_id, on_change)
                if took and told is not None and not told.adapter and self._state.version == told.version:
                    await set_within(self._poked, SETTLED_LOOK_S)
                    continue
                committed, digest, number = await self._ledger.heading()
                if self._hold not in (None, committed):
                    committed, digest = await self._kept(self._hold)
                if not state.in_service and not state.quarantined and state.version >= committed:
                    state.confirmed()
                    on_change(True)
                # Compared for inequality, because the numbers start again in a Redis that lost its data.
                known = (0, self._seen_epoch, told.epoch if told is not None else 0)  # looked into a moment ago
                told = await self._ledger.announced(number) if number not in known else None
                if told is not None and await self._look_into(told, worker_id, on_change):
                    continue
                later_s = self._budget.wait_s(self._budget.usual) if state.version < committed else 0.0
                wait_s = min(wait_s, later_s or wait_s)
                if not later_s and state.takes_weights() and await self._come_after(worker_id, committed, digest):
                    on_change(True)
                    continue
                if state.overdue and state.takes_weights() and not self.catch_up.under_way:
                    self._on_stuck()
                if state.takes_weights() and await self.adapters.keep_up(worker_id, state.turn):
                    on_change(True)
                    continue
                lacks = not state.in_service or state.quarantined or state.version < committed
                self._say_if_it_waits(committed)
                if not lacks and not number and not self.adapters.any:
                    wait_s = SETTLED_LOOK_S
            except (RedisError, OSError, MessageError) as error:
                name_once(f"the weights ledger cannot be read: {error}")
            await set_within(self._poked, wait_s)

    async def _kept(self, hold: int) -> tuple[int, str]:
        """The version that is kept, in place of the committed one, and its digest if it has yet to come."""
        return hold, await self._ledger.digest_of(hold) if self._state.version < hold else ""

    async def _come_after(self, worker_id: str, committed: int, digest: str) -> bool:
        """Get the committed version without a transfer if this worker lacks it. Returns whether it has just come."""
        report = await self.catch_up.look(worker_id, self._state.version, committed, digest)
        if report is None or not report.ok:
            return False
        if report.holder and report.way != "disk":  # whose order has no token, by which it could be asked for
            with suppress(RedisError, OSError):  # another one has it too
                await self._offer_to_others(worker_id, committed, report)
        return True

    async def _offer_to_others(self, worker_id: str, version: int, report: TransferReport) -> None:
        trainer, workers = await self._ledger.holders(version)
        known = trainer or next(iter(workers), None)
        if known is not None:
            await self._ledger.holds(worker_id, VersionHolder(version, report.holder, known.token))

    async def _look_into(self, told: WeightAnnouncement, worker_id: str, on_change: Callable[[bool], None]) -> bool:
        """Take part in a transfer if it concerns this worker. Returns False if the weights may not be touched now."""
        lacked = told.epoch != self._seen_epoch and not told.adapter and told.version > self._state.version
        lacked = lacked and self._hold in (None, told.version)
        if not self._state.takes_weights() or (lacked and await self._budget.postpones(told, worker_id, self._ledger)):
            return False
        async with self._state.turn.take("a weight transfer"):
            if not self._state.takes_weights():  # the engine went to sleep, or died, before the turn came
                return False
            if told.epoch != self._seen_epoch:
                before, self._seen_epoch = self._seen_epoch, told.epoch
                try:
                    on_change(await self._take_part(told, worker_id))
                except (RedisError, OSError):
                    self._seen_epoch = before  # so that it is tried again: the sender may still wait for this worker
                    raise
        return True

    async def _take_part(self, told: WeightAnnouncement, worker_id: str) -> bool:
        """Returns whether jobs have waited for what it brought, or may have."""
        if told.adapter:  # it loads while the engine runs
            if not self.adapters.concerned(told):
                return False
            report = await self.adapters.take(told, worker_id)
            self._journal.updated(told.version, report, adapter=told.adapter)
            return await self._report(told, worker_id, report)
        if self._hold not in (None, told.version):
            why = f"this worker stays at version {self._hold}"
            return await self._report(told, worker_id, TransferReport(ok=False, phase="held", error=why))
        if told.version <= self._state.version:
            return False
        served = self._state.in_service
        self.catch_up.stop()
        self._journal.announced(told)
        for attempt in range(ATTEMPTS):
            try:
                report = await self._receive_and_load(TransferOrder.of_announcement(told, worker_id), told)
            except (EngineDead, InvalidField) as error:
                report = TransferReport(ok=False, phase="rendezvous", error=str(error))
                break
            again = report.phase in LINE_TROUBLE or not report.intact
            again |= told.mode == "auto" and self._budget.refused_in_place(report)
            if report.ok or not again or attempt == ATTEMPTS - 1:
                break
            if self._state.dead.is_set() or not await self._goes_on(told):
                break
            log.info("version %s: %s; once more", told.version, report.error)
        if not report.ok:
            log.warning("version %s was refused in %s: %s", told.version, report.phase, report.error)
        return await self._report(told, worker_id, report) or served != self._state.in_service

    async def _report(self, told: WeightAnnouncement, worker_id: str, report: TransferReport) -> bool:
        """Report to the sender, which waits for it. During an outage of Redis it is tried until the deadline.

        Returns whether jobs waited for the version.
        """
        tracing.past(
            "rolloutmq sync", report.seconds, epoch=told.epoch, adapter=told.adapter, ok=report.ok, bytes=report.nbytes
        )
        tell = partial(self._ledger.report, told, worker_id, report)
        return await through_outage(tell, time.monotonic() + REPORT_S)

    async def _receive_and_load(self, order: TransferOrder, told: WeightAnnouncement) -> TransferReport:
        report = await self._prepare(order)
        return await self._commit(order, told) if report.ok else report

    async def _first(self, work: asyncio.Future[Any], told: WeightAnnouncement | None) -> bool:
        """Wait for `work`. As soon as the transfer is given up, cancels it and returns False."""
        watching = asyncio.create_task(self._is_given_up(told))
        try:
            await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
        if not work.done():
            work.cancel()
        return work.done()

    async def _is_given_up(self, told: WeightAnnouncement | None) -> None:
        """Return when it is. What is nobody's transfer never is."""
        while told is None or (told.epoch != self._given_up and await self._goes_on(told)):
            self._poked.clear()
            await set_within(self._poked, LOOK_S)

    async def _goes_on(self, told: WeightAnnouncement) -> bool:
        try:
            return await self._ledger.goes_on(told)
        except (RedisError, OSError):
            return True

    async def _commit(self, order: TransferOrder, told: WeightAnnouncement | None = None) -> TransferReport:
        """told: of the transfer, if it is one."""
        if told is not None and told.epoch == self._given_up:  # nobody waits for Redis while generation stands still
            return _over()
        order = replace(order, mode=self._budget.choose(order.mode))
        async with self._ready_to_load(order, told) as why_not:
            if why_not is not None:
                return why_not
            self._state.updating = True
            try:
                return await self._load(order)
            finally:
                self._state.updating = False

    async def _load(self, order: TransferOrder) -> TransferReport:
        in_place = order.mode == "in_place" and not self._state.quarantined
        try:
            report = await self._ask(self._engine.commit_weights(order), order)
        except asyncio.CancelledError:
            self._on_stuck()  # the load continues in the engine: nobody knows what it will hold
            raise
        if report.ok:
            if in_place:
                self._generation.in_flight.switched(order.version, report.switched, report.anew)
            self._state.has(order.version)
        elif not report.intact and in_place:
            self._generation.in_flight.spoiled()
            self._on_stuck()  # it continues to generate with weights that are no version: only its end stops that
        elif not report.intact:
            self._state.broken(patient=self._state.patient)
        return report

    @asynccontextmanager
    async def _ready_to_load(
        self, order: TransferOrder, told: WeightAnnouncement | None
    ) -> AsyncIterator[TransferReport | None]:
        """Bring generation into the state that the update's mode needs. Yields a report if that was not possible."""
        if order.mode == "in_place" and not self._state.quarantined:
            async with self._budget.timed("in_place", order.version), self._generation.in_flight.switching():
                yield None
        elif order.mode == "drain":
            with self._generation.gate.holder("update"):
                idle = asyncio.create_task(self._generation.in_flight.idle(order.drain_s))
                if not await self._first(idle, told):
                    yield _over()
                elif idle.result():
                    yield None
                else:
                    late = "what was running did not end in the time the trainer gives"
                    yield TransferReport(ok=False, phase="load", error=late)
        else:
            async with self._budget.timed("resume", order.version), self._generation.in_flight.quiet():
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
        self._vitals.synced(report)
        self._journal.updated(order.version, report, mode=order.mode, transport=report.way)
        return report

    async def load(self, order: TransferOrder) -> TransferReport:
        """Load what an operator ordered, by both halves of an update. Raises EngineDead."""
        state = self._state
        async with state.turn.take(f"the load of version {order.version}"):
            here = state.version
            if not state.weights.is_open:
                return TransferReport(ok=False, phase="load", error=f"the engine is {', '.join(state.weights.reasons)}")
            if not (order.version > here or state.quarantined):  # another version came during the wait for the turn
                return TransferReport(ok=False, phase="load", error=f"version {here} came first")
            self.catch_up.stop()
            report = await self._prepare(order)
            return await self._commit(order) if report.ok else report

    # --- both halves -----------------------------------------------------------------------------------------------

    async def _finish(self, order: TransferOrder, report: TransferReport) -> TransferReport | None:
        async with self._state.turn.take(f"the load of version {order.version}"):
            if not self._state.takes_weights() or self._state.version >= order.version:
                return None
            if report.ok:  # what runs crosses it as the trainer wants it
                report = await self._commit(replace(order, mode=self._budget.usual))
                self._budget.refused_in_place(report)
            return report

    def _prepare(self, order: TransferOrder) -> Preparing:
        half = asyncio.create_task(self._ask(self._engine.prepare_weights(order), order))
        half.add_done_callback(self._has_prepared)
        return half

    def _has_prepared(self, half: asyncio.Task[TransferReport]) -> None:
        if not half.cancelled():
            half.exception()  # marks it as seen: nobody may be waiting any more
        self.poke()

    def _say_if_it_waits(self, committed: int) -> None:
        if (has := self._state.version) < committed and time.monotonic() - self._said > SAY_S:
            self._said = time.monotonic()
            log.info("version %s is committed, this worker has %s and tries to get it", committed, has)


def _over() -> TransferReport:
    """Return the report of a transfer that its sender has given up, or that another one has replaced."""
    error = f"{TransferTimeout.__name__}: the transfer was given up before it was loaded"
    return TransferReport(ok=False, phase="rendezvous", error=error)
