"""The scaler: starts and drains workers, here or in a cluster's queue, as the policy says."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from redis.exceptions import RedisError

from ...messages.errors import RolloutMQError
from ...messages.model import WorkerStatus
from .member import Member, Site
from .places import FIRST_PAUSE_S, Place
from .policy import Decision, History, PoolView, ScaleSettings, decide
from .scaler_lock import ScalerLock

log = logging.getLogger(__name__)
HEALTHY_S = 60.0
"""A worker that has served for so long has not failed because of its place."""
CRASHES = 5
"""Failures in a row, without any worker that has served in between: then nothing here can work."""
SERVES = ("serving", "updating")


class CrashLoop(RolloutMQError):
    """Workers fail again and again."""


class Watch(Protocol):
    """Looks at a pool. workers: the living ones, as of the last look."""

    workers: tuple[WorkerStatus, ...]

    async def look(self) -> PoolView | None:
        """The pool now; None if it could not be read."""


@dataclass(frozen=True, slots=True)
class Means:
    """How workers are started. site: where. every_s: seconds between two looks at the pool. ready_s: seconds in which a
    worker has to serve; it counts as failed afterwards. leave_s: seconds in which a worker that drains has to end;
    afterwards it is killed. pause_s: before the first restart, then twice as long each time."""

    site: Site
    every_s: float = 2.0
    ready_s: float = 1800.0
    leave_s: float = 90.0
    pause_s: float = FIRST_PAUSE_S


class Scaler:
    """Keeps as many workers as the policy wants in its places; the bounds of the settings are those of its own workers.

    Workers of others count for the pool, and are left alone. A worker leaves by SIGTERM: it finishes what fits into its
    drain budget, and hands the rest back with the tokens it has. The one with the least in flight leaves first.
    """

    def __init__(
        self, settings: ScaleSettings, means: Means, free: list[Place], watch: Watch, lock: ScalerLock
    ) -> None:
        self.members: list[Member] = []
        self.decision = Decision(settings.least, "unknown", "")
        self.least_serve = asyncio.Event()
        """Set once as many as are always to run have served."""
        self.draining = False
        """Whether all workers were told to leave."""
        self._settings, self._means, self._places, self._watch, self._lock = settings, means, free, watch, lock
        self._history = History()
        self._gone: list[Member] = []
        self._crashes = 0
        self._running: asyncio.Task[None] | None = None
        self._told_to_stop = False
        self._trouble = ""

    async def run(self) -> None:
        """Scale until cancelled; then every worker is drained. Raises CrashLoop, and ConfigError if another scaler has
        taken over; then, too, the workers have left."""
        self._running = asyncio.current_task()
        try:
            while True:
                await self.step()
                await self._pause()
        finally:
            await self._drain_all()

    def stop(self) -> None:
        """Drain all workers and end `run`, if nothing else has ended it already. A second call kills them."""
        if self._told_to_stop:
            self.kill_all()
        elif self._running is not None and not self.draining:
            self._running.cancel()
        self._told_to_stop = True

    async def step(self) -> None:
        """Look once, and act on it."""
        if not await self._look():
            return
        view = await self._watch.look()
        self._kill_overdue()
        self._note_ended(pool_answers=view is not None)
        if view is None:  # a worker could not start now, and nobody knows which is needed
            return
        try:
            await self._lock.keep()
        except (RedisError, OSError):
            return
        self._note_serving()
        view = self._with_own(view)
        others = view.present - len(self._present())
        bounds = replace(self._settings, least=self._settings.least + others, most=self._settings.most + others)
        decision, self._history = decide(view, bounds, self._history)
        if (decision.wanted, decision.state) != (self.decision.wanted, self.decision.state):
            log.info("%s: %d workers are wanted. %s", decision.state, decision.wanted, decision.why)
        self.decision = decision
        await self._become(max(self._settings.least, min(self._settings.most, decision.wanted - others)))

    # --- what there is ---------------------------------------------------------------------------------------------

    async def _look(self) -> bool:
        """Whether the site answers. While it does not, nobody knows which workers there are, and nothing is changed."""
        try:
            left = await self._means.site.look(self._free())
        except OSError as error:
            if str(error) != self._trouble:
                log.warning("nothing is changed: %s", error)
            self._trouble = str(error)
            return False
        self._trouble = ""
        for found in left:
            self.members.append(found)
            if self.draining:
                found.drain(self._means.leave_s)
        return True

    def _present(self) -> list[Member]:
        return [one for one in self.members if not one.leaving]

    def _status(self, member: Member) -> WorkerStatus | None:
        return next((one for one in self._watch.workers if member.has(one)), None)

    def _note_serving(self) -> None:
        now = time.monotonic()
        for member in self._present():
            status = self._status(member)
            if member.served_at is None and status is not None and status.state in SERVES:
                member.served_at, self._crashes = now, 0
                log.info("%s serves, %.1f s after its start", member.name, now - member.started_at)
            elif member.served_at is not None and now - member.served_at > HEALTHY_S:
                member.place.failures = 0
            elif member.served_at is None and now - member.started_at > self._means.ready_s:
                member.too_late = True
                member.kill()
        if sum(one.served_at is not None for one in self._present()) >= self._settings.least:
            self.least_serve.set()

    def _with_own(self, view: PoolView) -> PoolView:
        """The pool as this host knows it better: workers that have not joined yet, and those that are gone or leave and
        were seen to serve."""
        present, workers = self._present(), self._watch.workers
        self._gone = [one for one in self._gone if any(map(one.has, workers))]
        away = [*self._gone, *(one for one in self.members if one.leaving)]
        lost = [
            it
            for it in workers
            if it.state in SERVES and any(one.has(it) for one in away) and not any(one.has(it) for one in present)
        ]
        starting = sum(self._status(one) is None for one in present)
        return replace(
            view,
            serving=max(0, view.serving - len(lost)),
            running=max(0.0, view.running - sum(one.running for one in lost)),
            slots=max(0.0, view.slots - sum(one.max_running for one in lost)),
            draining=view.draining + len(lost),
            starting=view.starting + starting,
        )

    def _note_ended(self, pool_answers: bool) -> None:
        """Forget workers that have ended; those that were not to end have failed, or were taken away."""
        for member in [one for one in self.members if one.ended.done()]:
            self.members.remove(member)
            self._gone.append(member)
            if member.leaving or not (member.failed or member.too_late):
                log.info("%s has left, it %s", member.name, member.how_it_ended())
                continue
            how = f"did not serve within {self._means.ready_s:g} s" if member.too_late else member.how_it_ended()
            if not pool_answers:  # without Redis every worker ends
                log.warning("%s %s while Redis does not answer", member.name, how)
                continue
            if member.served_at is not None:
                self._crashes = 0
            self._note_failed(member.place, how, member.last_lines())

    def _note_failed(self, place: Place, how: str, last: str) -> None:
        """Nothing starts in this place for a while. Raises CrashLoop."""
        self._crashes += 1
        name, pause_s = f"worker-{place.number}", place.failed(time.monotonic(), self._means.pause_s)
        log.warning("%s %s; the next one starts in %g s. Its last lines:\n%s", name, how, pause_s, last)
        none_works = all(one.served_at is None for one in self._present())
        if none_works and (self._crashes >= CRASHES or all(one.given_up for one in self._places)):
            raise CrashLoop(f"{self._crashes} workers in a row failed. The last one {how}; its last lines:\n{last}")
        if place.given_up:
            log.error("%s failed %d times in a row: nothing is started there any more", name, CRASHES)

    # --- what becomes of it ----------------------------------------------------------------------------------------

    async def _become(self, wanted: int) -> None:
        present, now = self._present(), time.monotonic()
        free = [one for one in self._free() if not one.given_up and one.not_before <= now]
        for place in sorted(free, key=lambda one: one.failures)[: max(0, wanted - len(present))]:
            log.info("worker-%d starts", place.number)
            try:
                self.members.append(await self._means.site.start(place, self._means.leave_s))
            except OSError as error:  # a full disk, no more processes: those that run go on
                self._note_failed(place, f"cannot be started: {error}", "")
        for member in sorted(present, key=self._cost)[: max(0, len(present) - wanted)]:
            log.info("%s drains: it has %d samples", member.name, self._in_flight(member))
            member.drain(self._means.leave_s)

    def _free(self) -> list[Place]:
        """The places where no worker is."""
        taken = {one.place.number for one in self.members}
        return [one for one in self._places if one.number not in taken]

    def _cost(self, member: Member) -> tuple[bool, int]:
        """Whoever still waits for a machine leaves first, then whoever has the least in flight."""
        return math.isfinite(member.started_at), self._in_flight(member)

    def _in_flight(self, member: Member) -> int:
        status = self._status(member)
        return status.held if status is not None else 0

    async def _pause(self) -> None:
        """Until the next look is due, or a worker has ended."""
        ended = [one.ended for one in self.members]
        if ended:
            await asyncio.wait(ended, timeout=self._means.every_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(self._means.every_s)

    def _kill_overdue(self) -> None:
        for member in self.members:
            if not member.ended.done() and time.monotonic() > member.leave_by:
                log.warning("%s hangs: it has not left in %g s", member.name, self._means.leave_s)
                member.kill()

    async def _drain_all(self) -> None:
        self.draining = True
        await self._look()  # a start may have been cut short that has begun all the same
        for member in self.members:
            if not member.ended.done():
                member.drain(self._means.leave_s)
        if self.members:
            told = "waiting until %d workers have left, %g s at most; a second Ctrl-C or SIGTERM kills them"
            log.info(told, len(self.members), self._means.leave_s)
        while waiting := [one.ended for one in self.members if not one.ended.done()]:
            await asyncio.wait(waiting, timeout=self._means.every_s)
            self._kill_overdue()
            await self._look()
            # Until they have left, another scaler would start its workers on the same GPUs.
            with suppress(RedisError, OSError, TimeoutError, RolloutMQError):
                async with asyncio.timeout(1.0):
                    await self._lock.keep()

    def kill_all(self) -> None:
        """For whoever does not want to wait until the workers have drained."""
        for member in self.members:
            member.kill()
