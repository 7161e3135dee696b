"""The local autoscaler: starts and drains worker processes on this host, as the policy says."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from redis.exceptions import RedisError

from ...messages.errors import RolloutMQError
from ...messages.model import WorkerStatus
from .places import FIRST_PAUSE_S, Place
from .policy import Decision, History, PoolView, ScaleSettings, decide
from .process import WorkerProcess
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
    """How workers are started. command: of one worker; it joins the pool of the watch. environment: beside this
    process' own. folder: for their logs. every_s: seconds between two looks at the pool. ready_s: seconds in which a
    worker has to serve; it counts as failed afterwards. leave_s: seconds in which a worker that drains has to end;
    afterwards it is killed. pause_s: before the first restart, then twice as long each time."""

    command: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    every_s: float = 2.0
    ready_s: float = 1800.0
    leave_s: float = 90.0
    pause_s: float = FIRST_PAUSE_S


class LocalScaler:
    """Keeps as many workers as the policy wants in its places; the bounds of the settings are those of its own workers.

    Workers of others count for the pool, and are left alone. A worker leaves by SIGTERM: it finishes what fits into its
    drain budget, and hands the rest back with the tokens it has. The one with the least in flight leaves first.
    """

    def __init__(
        self, settings: ScaleSettings, means: Means, free: list[Place], watch: Watch, lock: ScalerLock
    ) -> None:
        self.processes: list[WorkerProcess] = []
        self.decision = Decision(settings.least, "unknown", "")
        self.least_serve = asyncio.Event()
        """Set once as many as are always to run have served."""
        self.draining = False
        """Whether all workers were told to leave."""
        self._settings, self._means, self._places, self._watch, self._lock = settings, means, free, watch, lock
        self._history = History()
        self._ended_pids: set[int] = set()
        self._crashes = 0
        self._host = socket.gethostname()
        self._running: asyncio.Task[None] | None = None
        self._told_to_stop = False

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

    def _present(self) -> list[WorkerProcess]:
        return [one for one in self.processes if not one.leaving]

    def _status(self, process: WorkerProcess) -> WorkerStatus | None:
        mine = (one for one in self._watch.workers if one.host == self._host and one.pid == process.pid)
        return next(mine, None)

    def _note_serving(self) -> None:
        now = time.monotonic()
        for process in self._present():
            status = self._status(process)
            if process.served_at is None and status is not None and status.state in SERVES:
                process.served_at, self._crashes = now, 0
                log.info("worker-%d serves, %.1f s after its start", process.place.number, now - process.started_at)
            elif process.served_at is not None and now - process.served_at > HEALTHY_S:
                process.place.failures = 0
            elif process.served_at is None and now - process.started_at > self._means.ready_s:
                process.too_late = True
                process.kill()
        if sum(one.served_at is not None for one in self._present()) >= self._settings.least:
            self.least_serve.set()

    def _with_own(self, view: PoolView) -> PoolView:
        """The pool as this host knows it better: workers that have not joined yet, and those that are gone or leave and
        were seen to serve."""
        gone = self._ended_pids | {one.pid for one in self.processes if one.leaving}
        mine = [it for it in self._watch.workers if it.host == self._host]
        self._ended_pids &= {it.pid for it in mine}
        lost = [it for it in mine if it.pid in gone and it.state in SERVES]
        starting = sum(self._status(one) is None for one in self._present())
        return replace(
            view,
            serving=max(0, view.serving - len(lost)),
            running=max(0.0, view.running - sum(one.running for one in lost)),
            slots=max(0.0, view.slots - sum(one.max_running for one in lost)),
            draining=view.draining + len(lost),
            starting=view.starting + starting,
        )

    def _note_ended(self, pool_answers: bool) -> None:
        """Forget processes that have ended; those that were not to end have failed."""
        for process in [one for one in self.processes if one.exit_code is not None]:
            self.processes.remove(process)
            self._ended_pids.add(process.pid)
            name = f"worker-{process.place.number}"
            if process.leaving:
                log.info("%s has left, %s", name, process.how_it_ended())
                continue
            how = f"did not serve within {self._means.ready_s:g} s" if process.too_late else process.how_it_ended()
            if not pool_answers:  # without Redis every worker ends
                log.warning("%s %s while Redis does not answer", name, how)
                continue
            if process.served_at is not None:
                self._crashes = 0
            self._note_failed(process.place, how, process.last_lines())

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
        taken = {one.place.number for one in self.processes}
        free = [one for one in self._places if one.number not in taken and not one.given_up and one.not_before <= now]
        for place in sorted(free, key=lambda one: one.failures)[: max(0, wanted - len(present))]:
            log.info("worker-%d starts", place.number)
            means = self._means
            try:
                started = await WorkerProcess.start(
                    place, means.command, means.environment, means.folder, means.leave_s
                )
            except OSError as error:  # a full disk, no more processes: those that run go on
                self._note_failed(place, f"cannot be started: {error}", "")
                continue
            self._ended_pids.discard(started.pid)
            self.processes.append(started)
        for process in sorted(present, key=self._in_flight)[: max(0, len(present) - wanted)]:
            log.info("worker-%d drains: it has %d samples", process.place.number, self._in_flight(process))
            process.drain(self._means.leave_s)

    def _in_flight(self, process: WorkerProcess) -> int:
        status = self._status(process)
        return status.held if status is not None else 0

    async def _pause(self) -> None:
        """Until the next look is due, or a worker has ended."""
        ended = [one.ended for one in self.processes]
        if ended:
            await asyncio.wait(ended, timeout=self._means.every_s, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(self._means.every_s)

    def _kill_overdue(self) -> None:
        for process in self.processes:
            if process.exit_code is None and time.monotonic() > process.leave_by:
                log.warning("worker-%d hangs: it has not left in %g s", process.place.number, self._means.leave_s)
                process.kill()

    async def _drain_all(self) -> None:
        self.draining = True
        for process in self.processes:
            if process.exit_code is None:
                process.drain(self._means.leave_s)
        if self.processes:
            told = "waiting until %d workers have left, %g s at most; a second Ctrl-C or SIGTERM kills them"
            log.info(told, len(self.processes), self._means.leave_s)
        while waiting := [one.ended for one in self.processes if not one.ended.done()]:
            await asyncio.wait(waiting, timeout=self._means.every_s)
            self._kill_overdue()
            # Until they have left, another scaler would start its workers on the same GPUs.
            with suppress(RedisError, OSError, TimeoutError, RolloutMQError):
                async with asyncio.timeout(1.0):
                    await self._lock.keep()

    def kill_all(self) -> None:
        """For whoever does not want to wait until the workers have drained."""
        for process in self.processes:
            process.kill()
