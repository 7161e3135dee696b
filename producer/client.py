"""The trainer's client: submit jobs, take results as they finish or by group, cancel."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from ..messages.broker import Broker, Caps, PoolLoad
from ..messages.errors import ClientBusy, InvalidField, JobFailed, PoolBusy, RolloutMQError, WaitTimeout
from ..messages.ids import check_client_id
from ..messages.model import GenerateJob, RolloutResult, WorkerStatus
from ..messages.redis import connect, default_url, ping
from .calls.stream import Streams
from .calls.stream_calls import StreamCalls
from .calls.task_calls import TaskCalls
from .inbox import FeatureCheck, Group, Inbox, Inboxes, JobHandle, News, Outcome, ReplyReader, as_failure, as_group

if TYPE_CHECKING:
    from .control import PoolControl

__all__ = ["Group", "JobHandle", "Outcome", "RolloutClient"]
_OPEN = frozenset({"new", "q", "r"})
RETRY_S = 0.2


class RolloutClient(StreamCalls, TaskCalls):
    """An asyncio client of one pool, for one task or many of one event loop.

    Guarantees: a job that `submit` returned for is accepted, and reaches this client as all its results or as the
    results it got and one JobFailure. Within a process every outcome is handed out exactly once. An outcome stays on
    the reply stream until the code that took it comes back for the next one (or `wait` returned it): a client that
    crashes and starts again under the same `client_id` gets what it had not finished with. Leaving a loop over
    outcomes by an error or by `break` does not count as coming back: the last outcome stays there, too.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        client_id: name of the reply stream; by default a new one, whose unread results nobody will ask for again.
        max_outstanding: samples submitted and not taken yet; `submit` raises ClientBusy above it. This, times the size
            of a result, bounds the client's memory. `map` keeps to a window instead.
        caps: where the pool answers PoolBusy to this client.
        before_ack: called before what was taken is acknowledged; False puts it off to a later call. For code that first
            makes durable what it took. Its argument says whether the client closes, which is the last call.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        client_id: str | None = None,
        max_outstanding: int = 1 << 18,
        caps: Caps | None = None,
        before_ack: Callable[[bool], bool] | None = None,
    ) -> None:
        if client_id is not None:
            check_client_id("client_id", client_id)
        self.client_id = client_id or f"client-{secrets.token_hex(8)}"
        self._max_outstanding = max_outstanding
        url = redis_url or default_url()
        self._redis, self._blocking = connect(url, pool=pool), connect(url, pool=pool, blocking=True)
        self.broker = Broker(self._redis, pool, caps)
        self._features = FeatureCheck(self.broker)
        self._inbox = Inbox()
        self._inboxes = Inboxes(self._inbox)
        self._reader = ReplyReader(self.broker, self._blocking, self.client_id, self._inboxes, before_ack)
        news = News(self.broker, self._blocking, self.client_id, self._reader.notify)
        self._streams = Streams(self.broker, news, self._inbox, self._reader, self._until)
        self._opening = asyncio.Lock()

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called, or reading broke: nothing can be submitted any more."""
        try:
            self._reader.check_open()
        except RolloutMQError:
            return True
        return False

    @property
    def repeats(self) -> int:
        """Outcomes that came again and that this client kept to itself: 0 unless a failover lost acknowledgements."""
        return self._reader.repeats

    async def open(self) -> Self:
        """Connect. Raises RedisUnavailable. `async with` does it too, and so does the first call that needs it."""
        self._reader.check_open()
        async with self._opening:  # first calls at the same time start one reader
            if not self._reader.reading:
                await ping(self._redis)
                await self._reader.open()
        self._reader.check_open()
        return self

    async def aclose(self) -> None:
        """Acknowledge what was taken and disconnect, for good; jobs under way are not cancelled.

        Whoever waits for an outcome gets a RolloutMQError.
        """
        try:
            await self._streams.close()
            await self._reader.close()
        finally:
            await self._redis.aclose()
            await self._blocking.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- jobs in ---------------------------------------------------------------------------------------------------

    async def submit(
        self, job: GenerateJob | None = None, /, *, timeout: float | None = 0.0, **fields: Any
    ) -> JobHandle:
        """Submit one job, given whole or by the fields of GenerateJob: `submit(token_ids=[…], n=8)`.

        Raises InvalidField, PoolBusy, ClientBusy.
        """
        whole = job if job is not None else GenerateJob.build(**fields)
        return (await self.submit_many([whole], timeout=timeout))[0]

    async def submit_many(self, jobs: Iterable[GenerateJob], *, timeout: float | None = 0.0) -> list[JobHandle]:
        """Submit jobs in order.

        timeout: seconds to wait for room in a pool that is full; 0 raises PoolBusy at once, None waits for ever.
        If it is this client's own results that fill the pool, another task has to take some meanwhile.
        If PoolBusy is raised, its `accepted` first ones are in and will be answered. FeatureUnavailable says that no
        worker there is can do what one of them asks for; nothing was sent then.
        A job whose outcome waits here to be taken (an earlier client of this id submitted it) is not sent again.
        """
        mine = [job if job.reply_to else job.model_copy(update={"reply_to": self.client_id}) for job in jobs]
        for job in mine:
            if job.reply_to != self.client_id:
                raise InvalidField("reply_to", job.reply_to, f"empty, or this client's own id {self.client_id!r}")
        await self.open()
        await self.check(mine)
        samples = sum({job.id: job.n for job in mine if self._inbox.tracked(job.id) is None}.values())
        if self._inbox.samples + samples > self._max_outstanding:
            raise ClientBusy(
                f"{self._inbox.samples} samples are outstanding and {samples} more were submitted; "
                f"max_outstanding={self._max_outstanding}: take some results first"
            )
        try:
            states = await self._send_in_time(mine, timeout)
        except PoolBusy as busy:
            await self._settle(mine, busy.states)
            raise
        await self._settle(mine, states)
        return [JobHandle(job.id, job.group, job.n, state) for job, state in zip(mine, states, strict=True)]

    async def check(self, jobs: Iterable[GenerateJob]) -> None:
        """Raises FeatureUnavailable for the first job that no worker of the pool can run. `submit` does it, too."""
        await self._features.check(jobs)

    async def _settle(self, jobs: list[GenerateJob], states: list[str]) -> None:
        """Of jobs that had ended before they were submitted again, expect what is still to be read and no more."""
        ended = {job.id: state for job, state in zip(jobs, states, strict=False) if state not in _OPEN}
        if not ended:
            return
        ahead = await self._reader.ahead()
        for job_id, state in ended.items():
            if job_id not in ahead:
                self._inbox.end(job_id, state)
        await self._forget(ended.keys() - ahead)

    async def _send_in_time(self, jobs: list[GenerateJob], timeout: float | None) -> list[str]:
        deadline = None if timeout is None else time.monotonic() + timeout
        accepted, pause = 0, 0.02
        first: list[str] = []
        while True:
            self._reader.check_open()
            try:
                return first + await self._send(jobs[accepted:])
            except PoolBusy as busy:
                accepted += busy.accepted
                first += busy.states
                if deadline is not None and time.monotonic() + pause >= deadline:
                    busy.accepted, busy.states = accepted, first
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # submitters that wait do not come back in step
            pause = min(0.5, pause * 2)

    async def _send(self, jobs: list[GenerateJob]) -> list[str]:
        """Track and enqueue jobs; the state of each. Expects nothing of those that were not accepted."""
        # Tracked before they are sent: the first result may be here before the reply to the submission.
        fresh = {job.id for job in jobs if self._inbox.track(job.id, job.group, job.n)}
        # The pool may have forgotten a job that ended, and would run it again.
        states = [it.state if (it := self._inbox.tracked(job.id)) and it.ended else "" for job in jobs]
        places = [place for place, state in enumerate(states) if not state]
        accepted = 0
        try:
            for place, state in zip(places, await self.broker.enqueue([jobs[place] for place in places]), strict=True):
                states[place] = state
            accepted = len(places)
        except PoolBusy as busy:
            accepted, busy.accepted = busy.accepted, places[busy.accepted]  # counted over the caller's list
            for place, state in zip(places, busy.states, strict=False):
                states[place] = state
            busy.states = states[: busy.accepted]
            raise
        finally:
            if accepted < len(places):
                await self._forget(fresh - {jobs[place].id for place in places[:accepted]})
        return states

    async def _forget(self, job_ids: Iterable[str]) -> None:
        """Expect nothing of these, apart from those that were accepted after all: an outcome is here already."""
        for job_id in job_ids:
            if (tracked := self._inbox.tracked(job_id)) and not tracked.arrived:
                self._inbox.untrack(job_id)
        await self._reader.notify()

    async def cancel(self, jobs: Sequence[JobHandle | str]) -> list[str]:
        """Cancel jobs; each ends with a JobFailure unless it had ended already. Per job "ok" or the state it was in."""
        return await self.broker.cancel([job if isinstance(job, str) else job.job_id for job in jobs])

    @cached_property
    def control(self) -> PoolControl:
        """Commands to the pool's workers, over this client's connection."""
        from .control import PoolControl  # noqa: PLC0415 – which imports this module

        return PoolControl(self)

    async def stop(self, jobs: Sequence[JobHandle | str], timeout: float = 30.0) -> int:
        """End jobs with what they have; returns how many of them were open, when all have ended.

        Samples that are not finished come as results with finish_reason "abort" and the tokens they have; a job of
        which nothing was generated yet ends with a JobFailure, as cancelled. Raises WaitTimeout; they end all the same.
        """
        ids = [job if isinstance(job, str) else job.job_id for job in jobs]
        states = await self.broker.stop(ids)
        stopped = sum(state in {"ok", "unbegun"} for state in states)
        deadline, pause = time.monotonic() + timeout, 0.01
        while ids := [job_id for job_id, state in zip(ids, states, strict=True) if state == "ok"]:
            if time.monotonic() >= deadline:
                raise WaitTimeout(f"{len(ids)} of {len(jobs)} jobs did not end within {timeout:g} s")
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)
            states = await self.broker.stop(ids)  # said again: a worker may not have heard it
        return stopped

    async def cancel_group(self, group_id: str) -> int:
        """Cancel what this client has open of a group, an earlier client of the same id included; returns how many."""
        await self.open()
        states = await self.broker.cancel(self._inbox.group_jobs(group_id), "cancelled with its group")
        return states.count("ok")

    async def cancel_all(self) -> int:
        """Cancel everything this client has open; returns how many jobs that were."""
        return await self.broker.cancel_client(self.client_id)

    # --- results out -----------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Jobs not fully handed out yet."""
        return self._inbox.jobs

    async def results(self, timeout: float | None = None) -> AsyncIterator[Outcome]:
        """Outcomes as they arrive, until nothing is outstanding. Raises WaitTimeout if none comes for `timeout` s.

        Coming back for the next outcome acknowledges the one before. After `break` or an error the last one is not
        acknowledged: only a client that starts again under the same id gets it once more. Use `wait` for single jobs.
        """
        while True:
            await self._until(lambda: len(self._inbox) > 0 or not self._inbox.jobs, timeout)
            reply = self._inbox.take_next()
            if reply is None:
                return
            yield cast(Outcome, reply.outcome)  # tasks are in the other inbox
            await self._reader.ack([reply])

    async def groups(self, timeout: float | None = None) -> AsyncIterator[Group]:
        """Groups as they become complete, until nothing is outstanding. Times out and acknowledges like `results`."""
        while True:
            await self._until(lambda: self._inbox.full_group() is not None or not self._inbox.jobs, timeout)
            group_id = self._inbox.full_group()
            if group_id is None:
                return
            replies = self._inbox.take_group(group_id)
            yield as_group(group_id, replies)
            await self._reader.ack(replies)

    async def wait(self, job: JobHandle, timeout: float | None = None) -> list[RolloutResult]:
        """All results of one job, by sample number.

        Raises WaitTimeout (nothing is lost, wait again), JobFailed if it ended without all of them, or RolloutMQError
        if somebody else took them from this client.
        """
        ended = await self.ending(job, timeout)
        if ended.failures:
            raise JobFailed(ended.failures[0])
        return list(ended.results)

    async def ending(self, job: JobHandle, timeout: float | None = None) -> Group:
        """All that came of one job: its samples, by number, and its failure if that are not all. Else like `wait`."""
        await self._until(lambda: (it := self._inbox.tracked(job.job_id)) is None or it.ended, timeout)
        if self._inbox.tracked(job.job_id) is None:
            if job.state in _OPEN:
                raise RolloutMQError(f"nothing is outstanding of job {job.job_id}: what came of it was taken before")
            raise JobFailed(as_failure(job.job_id, job.state))
        replies = self._inbox.take_job(job.job_id)
        await self._reader.ack(replies)
        return as_group(job.group_id, replies)

    async def map(
        self, jobs: Iterable[GenerateJob], *, window: int = 1024, timeout: float | None = None
    ) -> AsyncIterator[Outcome]:
        """Submit `jobs` as results are taken, at most `window` of them outstanding; yields outcomes as they arrive.

        Waits while the pool is busy. Jobs may be a generator of any length: memory is bounded by the window.
        Acknowledges like `results`.
        """
        if window < 1:
            raise InvalidField("window", window, "at least 1")
        source = iter(jobs)
        batch: list[GenerateJob] = []
        exhausted = False
        while True:
            while not exhausted and len(batch) + self._inbox.jobs < window:
                job = next(source, None)
                exhausted = job is None
                if job is not None:
                    batch.append(job)
            busy = False
            if batch:
                try:
                    await self.submit_many(batch)
                    batch = []
                except PoolBusy as error:
                    batch, busy = batch[error.accepted :], True
            if not self._inbox.jobs and not batch:
                return
            try:
                await self._until(lambda: len(self._inbox) > 0, RETRY_S if busy else timeout)
            except WaitTimeout:
                if busy:
                    continue
                raise
            # One round takes what is here, so that a refill is a batch and not one job at a time.
            for _ in range(len(self._inbox)):
                reply = self._inbox.take_next()
                if reply is None:
                    break
                yield cast(Outcome, reply.outcome)  # tasks are in the other inbox
                await self._reader.ack([reply])

    # --- looking around --------------------------------------------------------------------------------------------

    async def load(self) -> PoolLoad:
        """How much is queued, open and finished in the pool."""
        return await self.broker.load()

    async def workers(self) -> list[WorkerStatus]:
        """The pool's workers as of their last heartbeat."""
        return await self.broker.workers()

    async def _until(self, ready: Callable[[], bool], timeout: float | None) -> None:
        if not self._reader.reading:
            await self.open()
        if not ready():
            await self._reader.until(ready, timeout)
        self._reader.check_open()
