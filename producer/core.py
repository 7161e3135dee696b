"""What every call of a client stands on: its connections, its reply stream, and the jobs it has submitted."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from ..messages import tracing
from ..messages.arguments import each_is
from ..messages.broker import Caps, Frames, Reply, broker_of
from ..messages.errors import ClientBusy, InvalidField, JobFailed, PoolBusy, RolloutMQError, WaitTimeout
from ..messages.ids import check_client_id
from ..messages.journal import Journal
from ..messages.model import GenerateJob, RolloutResult
from ..messages.progress import Bar
from ..messages.redis import connect, default_url, ping
from .diagnosis import Waits
from .inbox import (
    GAVE_UP,
    OPEN_STATES,
    Dropped,
    FeatureCheck,
    Group,
    Handle,
    HandOut,
    Inbox,
    JobHandle,
    LeftLoops,
    ReplyReader,
    Together,
    as_failure,
    as_group,
    own_context,
    under_way,
)
from .sending import Sent, counted, enqueued, enqueued_together, send_all

log = logging.getLogger(__name__)
BLOCKING_READS = 2
"""Of results, and of news of what is streamed."""
JOURNAL_S = 1.0
"""That a checkpoint waits for the journal's disk."""


def left_of(deadline: float | None) -> float | None:
    """Seconds until a deadline on time.monotonic(), 0 if it is over; None for none."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


class ClientCore:
    """Submits jobs of one client and takes what comes of them. RolloutClient says what its arguments mean.

    Batches, sessions, streams and tasks are built on it; it knows none of them. They wait with `until` for what they
    want to be in an inbox, take it from there, and give it to their caller: a call that returns it by `hand_over`, a
    loop by `hand_out`, which it acknowledges when its caller comes back. What a call submits for itself it reserves in
    the inbox, and gives up (`give_up`) if it ends without it.
    """

    def __init__(
        self,
        redis_url: str | None,
        pool: str,
        *,
        client_id: str | None,
        max_outstanding: int,
        caps: Caps | None,
        before_ack: Callable[[bool], bool] | None = None,
        journal: Journal | Path | str | None = None,
    ) -> None:
        if client_id is not None:
            check_client_id("client_id", client_id)
        self.client_id = client_id or f"client-{secrets.token_hex(8)}"
        self.max_outstanding = max_outstanding
        url = redis_url or default_url()
        self._redis = connect(url, pool=pool)
        self.broker = broker_of(self._redis, pool, caps)
        blocking = self._redis.reader(BLOCKING_READS)
        # For each shard what it is asked by, and the connections on which reads of it wait.
        self.shards = list(zip(self.broker.parts, getattr(blocking, "shards", ()) or (blocking,), strict=True))
        self.features = FeatureCheck(self.broker)
        self.inbox = Inbox()
        self._owns_journal = isinstance(journal, str | Path)
        self.journal = Journal(journal) if isinstance(journal, str | Path) else journal
        self.reader = ReplyReader(self.shards, self.client_id, self.inbox, before_ack=before_ack, journal=self.journal)
        self.inbox.freed, self.inbox.moved = self.reader.wake, self.reader.wake_for
        self.waits = Waits(self.broker)
        self.left_loops = LeftLoops()
        self._enqueue = {part: Together(partial(enqueued_together, part)) for part in self.broker.parts}
        self._opening = asyncio.Lock()
        self._finishing: set[asyncio.Task[None]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self.dropped = Dropped(self.broker, lambda: self.reader.over, self.start)

    async def open(self) -> None:
        """Connect and start to read, once. Raises RedisUnavailable, RolloutMQError after `close`, or WrongLoop."""
        self.reader.check_open()
        self.reader.check_loop()
        async with self._opening:  # first calls at the same time start one reader
            if not self.reader.reading:
                await ping(self._redis)
                await self.reader.open()
        self.reader.check_open()

    async def close(self) -> None:
        """Acknowledge what was taken and disconnect, for good. Raises WrongLoop."""
        self.reader.check_loop()
        self.waits.close()
        try:
            for task in self._beside:
                task.cancel()
            await asyncio.gather(*self._finishing, *self._beside, return_exceptions=True)
            await self.reader.close()
        finally:
            await self._redis.aclose()
            if self.journal is not None and self._owns_journal:
                await asyncio.to_thread(self.journal.close)

    def flush_journal(self) -> None:
        """Have what was noted so far in the journal's file. Blocks for a write; for JOURNAL_S if the disk refuses."""
        if self.journal is not None and not self.journal.flush(JOURNAL_S):
            log.warning(
                "the journal's file lacks its newest entries: they wait in memory, and are lost with this process"
            )

    async def until(self, ready: Callable[[], bool], timeout: float | None, job_id: str | None = None) -> None:
        """Return once `ready()`, which is asked whenever something arrives, or something of the job `job_id`.

        Raises WaitTimeout and WrongLoop.
        """
        self.reader.check_loop()
        if not self.reader.reading:
            await self.open()
        if not ready():
            await self._wait(ready, timeout, job_id)
        self.reader.check_open()

    async def _wait(self, ready: Callable[[], bool], timeout: float | None, job_id: str | None) -> None:
        self.waits.begin()
        came = False
        try:
            await self.reader.until(ready, timeout, job_id)
            came = True
        except WaitTimeout as late:
            raise WaitTimeout(late.told, await self.waits.told(timeout or 0.0)) from None
        finally:
            self.waits.end(came=came)

    # --- jobs in ---------------------------------------------------------------------------------------------------

    async def submit(self, job: GenerateJob) -> JobHandle:
        """Submit one job; raises PoolBusy at once if the pool is full."""
        return (await self.submit_many([job], 0.0))[0]

    async def submit_many(
        self, jobs: Iterable[GenerateJob], timeout: float | None, progress: bool | str = False
    ) -> list[JobHandle]:
        """See RolloutClient.submit_many."""
        given = jobs_given(jobs)
        mine = [job if job.reply_to else job.model_copy(update={"reply_to": self.client_id}) for job in given]
        for job in mine:
            if job.reply_to != self.client_id:
                raise InvalidField("reply_to", job.reply_to, f"empty, or this client's own id {self.client_id!r}")
            self.inbox.check(job)
        await self.open()
        await self.features.check(mine)
        samples = sum({job.id: job.n for job in mine if self.inbox.tracked(job.id) is None}.values())
        if self.inbox.samples + samples > self.max_outstanding:
            raise ClientBusy(
                f"{self.inbox.samples} samples are outstanding and {samples} more were submitted; "
                f"max_outstanding={self.max_outstanding}: take some results first"
            )
        try:
            with Bar(progress, "submitted", len(mine)) if progress else nullcontext() as bar:
                states = await send_all(counted(self._send, bar) if bar else self._send, mine, timeout)
        except PoolBusy as busy:
            await self._settle(mine, busy.states)
            raise
        await self._settle(mine, states)
        return [JobHandle(job.id, job.group, job.n, state, self.wait) for job, state in zip(mine, states, strict=True)]

    async def _settle(self, jobs: list[GenerateJob], states: list[str]) -> None:
        """Of jobs that had ended before they were submitted again, expect only what is still to be read."""
        ended = {job.id: state for job, state in zip(jobs, states, strict=False) if state not in OPEN_STATES}
        if not ended:
            return
        ahead = await self.reader.ahead()
        for job_id, state in ended.items():
            if job_id not in ahead:
                self.inbox.end(job_id, state)
        self._forget(ended.keys() - ahead)

    async def _send(self, jobs: Sequence[GenerateJob]) -> Sent:
        """Track and enqueue jobs. Those that were not accepted are not tracked."""
        self.reader.check_open()
        # Tracked before they are sent: the first result may arrive before the reply to the submission.
        fresh = {job.id for job in jobs if self.inbox.submit(job)}
        self.reader.expect(jobs)
        # The pool may have forgotten a job that ended, and would run it again.
        states = [it.state if (it := self.inbox.tracked(job.id)) and it.ended else "" for job in jobs]
        sent = [job for job, state in zip(jobs, states, strict=True) if not state]
        frames: Frames | None = None if self.journal is None else []
        answers: list[str] = []
        try:
            part = next((it for it in self._enqueue if all(it.has(job.id) for job in sent)), None)
            if part is not None and frames is None:
                answers, busy = await self._enqueue[part](sent)
            else:
                answers, busy = await enqueued(self.broker, sent, frames)
        finally:
            accepted = [place for place, state in enumerate(answers) if state]
            if self.journal is not None and frames is not None:
                self.journal.jobs([sent[place] for place in accepted], [frames[place] for place in accepted])
            into = {sent[place].id for place in accepted}
            self.inbox.accepted(into)
            if fresh - into:
                self._forget(fresh - into)
        new = iter(answers)
        return [state or next(new) for state in states], busy

    def _forget(self, job_ids: Iterable[str]) -> None:
        """Expect nothing of these, except of those with an outcome: they were accepted after all."""
        for job_id in job_ids:
            if (tracked := self.inbox.tracked(job_id)) and not tracked.arrived:
                self.inbox.untrack(job_id)
        self.reader.wake()

    # --- jobs ended ------------------------------------------------------------------------------------------------

    async def cancel(self, jobs: Sequence[Handle | str]) -> list[str]:
        """See RolloutClient.cancel."""
        self.reader.check_open()
        return await self.broker.cancel(_ids(jobs))

    async def stop(self, jobs: Sequence[Handle | str], timeout: float) -> int:
        """See RolloutClient.stop."""
        self.reader.check_open()
        ids = _ids(jobs)
        states = await self.broker.stop(ids)
        stopped = sum(state in {"ok", "unbegun"} for state in states)
        deadline, pause = time.monotonic() + timeout, 0.01
        while ids := [job_id for job_id, state in zip(ids, states, strict=True) if state == "ok"]:
            if time.monotonic() >= deadline:
                why = await self.waits.told(timeout)
                raise WaitTimeout(f"{len(ids)} of {len(jobs)} jobs did not end within {timeout:g} s", why)
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 2)
            states = await self.broker.stop(ids)  # asked again: a worker may have missed it
        return stopped

    async def wait(self, job: Handle, timeout: float | None = None) -> list[RolloutResult]:
        """See RolloutClient.wait."""
        ended = await self.ending(job, timeout)
        if ended.failures:
            raise JobFailed(ended.failures[0])
        return list(ended.results)

    async def ending(self, job: Handle, timeout: float | None = None) -> Group:
        """See RolloutClient.ending."""
        began = time.monotonic()
        await self.until(lambda: self.inbox.is_over(job.job_id), timeout, job.job_id)
        if self.inbox.tracked(job.job_id) is None:
            raise nothing_left(job)
        replies = self.inbox.take_job(job.job_id)
        self.hand_over(replies)
        tracing.past("rolloutmq wait", time.monotonic() - began, job_id=job.job_id)
        return as_group(job.group_id, replies)

    # --- outcomes to the caller ------------------------------------------------------------------------------------

    def hand_out(self, replies: list[Reply]) -> HandOut:
        """What was taken from the inbox goes to the caller, who acknowledges it later."""
        return HandOut(replies, self.reader.ack, self.inbox.put_back)

    def hand_over(self, replies: list[Reply]) -> None:
        """What was taken from the inbox is in the caller's hands when the call returns, which it now does."""
        out, crossing = self.hand_out(replies), under_way.get()
        if crossing is None:
            out.acknowledge()
        else:
            self.reader.ack_received(out, crossing)

    async def give_up(self, job_ids: Sequence[str], *, ended_too: bool = False) -> None:
        """Cancel jobs that a call reserved, and end the reservations. Nobody is told of what was cancelled.

        A client that is closed, or was replaced, cancels nothing: its jobs are for the next one of its id.
        What a job had that ended by itself is for whoever asks first; ended_too: it is dropped, whenever it comes. The
        caller's cancellation does not stop this.
        """
        await self.finish(self._give_up(list(job_ids), ended_too))

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for `work`, which goes on if the caller is cancelled meanwhile; `close` waits for it, too."""
        task = asyncio.create_task(work)
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)
        await asyncio.shield(task)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the calls, until it ends or the client closes, which cancels it."""
        task = asyncio.create_task(work, context=own_context())
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def _give_up(self, job_ids: list[str], ended_too: bool) -> None:
        own = [] if self.reader.over else job_ids
        left = [it for it in own if (tracked := self.inbox.tracked(it)) is None or not tracked.ended]
        # Before Redis is asked: it may say that a job has ended whose outcome is still on its way here.
        self._drop(own if ended_too else ())
        try:
            states = await (self.dropped.cancel(left) if ended_too else self.broker.cancel(left, GAVE_UP))
            # A submission that was cut off may reach Redis after this: an unknown job is not wanted either.
            self._drop(it for it, state in zip(left, states, strict=False) if state in {"ok", "unknown"})
        except (RedisError, OSError) as error:
            log.warning("jobs that nobody waits for were not cancelled: %s", error)
        finally:
            for job_id in job_ids:
                self.inbox.release(job_id)

    def _drop(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self.reader.ack(self.inbox.abandon(job_id))


def jobs_given(jobs: Iterable[GenerateJob]) -> list[GenerateJob]:
    """What a caller submits. Raises InvalidField for what is no job."""
    return each_is("jobs", jobs, GenerateJob, "a GenerateJob")


def _ids(jobs: Sequence[Handle | str]) -> list[str]:
    given = each_is("jobs", jobs, str | Handle, "a handle that submit returned, or a job's id")
    return [job if isinstance(job, str) else job.job_id for job in given]


def nothing_left(job: Handle) -> RolloutMQError:
    """The error for a job of which nothing is outstanding: it had ended before, or its outcome has been taken."""
    if job.state not in OPEN_STATES:
        return JobFailed(as_failure(job.job_id, job.state))
    return RolloutMQError(f"nothing is outstanding of job {job.job_id}: what came of it was taken before")
