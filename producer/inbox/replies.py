"""A client's replies: a reader for its stream in each shard of the pool, and whoever waits for what comes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

from redis.asyncio import Redis

from ...messages.broker import Broker, Reply
from ...messages.codec import Job
from ...messages.errors import ClientReplaced, RolloutMQError, WaitTimeout, WrongLoop, WrongProcess
from ...messages.journal import Journal
from .handover import Crossing, HandOut
from .inbox import Inbox
from .reader import StreamReader


class ReplyReader:
    """All streams of one client; their readers fill the same inbox, and know no other. Whoever waits hears of each.

    A shard that does not answer delays what is on its stream and nothing else. What is acknowledged goes to the shard
    on whose stream it was.
    """

    def __init__(
        self,
        shards: Sequence[tuple[Broker, Redis]],
        client_id: str,
        inbox: Inbox,
        *,
        before_ack: Callable[[bool], bool] | None,
        journal: Journal | None,
    ) -> None:
        """shards: the broker of each, and what reads that wait go through. before_ack, journal: see StreamReader."""
        self._client_id, self._inbox, self._pid = client_id, inbox, os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()  # set, and replaced, at every change
        self._of_jobs: dict[str, asyncio.Event] = {}  # of those that somebody waits for alone
        self.waiting = 0
        """How many calls wait in `until`."""
        self._closed = False
        self.streams = [
            StreamReader(part, blocking, client_id, inbox, before_ack=before_ack, journal=journal, changed=self.wake)
            for part, blocking in shards
        ]

    async def open(self) -> None:
        """Read what an earlier client of this id had not acknowledged, then go on reading in the background.

        Raises RedisUnavailable if one shard does not answer.
        """
        self._loop = asyncio.get_running_loop()
        found = await asyncio.gather(*(stream.begin() for stream in self.streams))
        # In this order: a job that had ended when `open_jobs` was asked has all its outcomes on the stream by now.
        open_jobs = {job: group for jobs, _ in found for job, group in jobs.items()}
        self._inbox.recover(open_jobs, {job_id: job for _, known in found for job_id, job in known.items()})
        self.check_open()
        for stream in self.streams:
            stream.start()

    @property
    def reading(self) -> bool:
        return self.streams[-1].reading

    async def close(self) -> None:
        """Stop reading, wake whoever waits, acknowledge what was taken."""
        if os.getpid() != self._pid:
            return  # the connections are the parent's
        self._closed = True
        self.wake()
        self.wake_for(list(self._of_jobs))
        first, *others = self.streams
        await first.close()  # it has what crosses to other threads, of all shards
        await asyncio.gather(*(stream.close() for stream in others))

    def check_open(self) -> None:
        """Raises RolloutMQError after `close`, WrongProcess in a forked child, ClientReplaced if another one reads."""
        if self._closed:
            raise RolloutMQError(f"client {self._client_id} is closed")
        if os.getpid() != self._pid:
            raise WrongProcess(f"client {self._client_id}", self._pid)
        if self._replaced:
            raise ClientReplaced(self._client_id)

    @property
    def _replaced(self) -> bool:
        return any(isinstance(stream.broken, ClientReplaced) for stream in self.streams)

    @property
    def over(self) -> bool:
        """Whether this client is closed, or another one of its id reads: what is under way is not its own any more."""
        return self._closed or self._replaced

    def check_loop(self) -> None:
        """Raises WrongLoop on another event loop than the one that `open` was called on."""
        if self._loop not in {None, asyncio.get_running_loop()} and os.getpid() == self._pid:
            raise WrongLoop(f"client {self._client_id}", self._loop.is_closed())

    def wake(self) -> None:
        """Have whoever waits in `until` for no job in particular look again, and everybody when the reading ended."""
        self._changed.set()
        self._changed = asyncio.Event()
        if any(stream.broken is not None for stream in self.streams):
            self.wake_for(list(self._of_jobs))

    def wake_for(self, job_ids: Iterable[str]) -> None:
        """Have whoever waits for one of these jobs look again."""
        for job_id in job_ids:
            if (waits := self._of_jobs.get(job_id)) is not None:
                waits.set()

    async def until(self, ready: Callable[[], bool], timeout: float | None, job_id: str | None = None) -> None:
        """Return once `ready()`, asked whenever something arrives. Raises WaitTimeout, or RolloutMQError if closed.

        job_id: ask only when something of this job arrives. Thousands of calls that wait for a job each do not wake
        one another. Only one call may wait for a job in this way; others ask at every change.
        """
        own = asyncio.Event() if job_id is not None and job_id not in self._of_jobs else None
        if job_id is not None and own is not None:
            self._of_jobs[job_id] = own
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.check_open()
                    if ready():
                        return
                    if broken := next((stream.broken for stream in self.streams if stream.broken is not None), None):
                        raise RolloutMQError(f"the reader of client {self._client_id} stopped") from broken
                    if own is None:
                        await self._changed.wait()
                    else:
                        own.clear()
                        await own.wait()
        except TimeoutError:
            raise WaitTimeout(f"nothing arrived for client {self._client_id} within {timeout:g} s") from None
        finally:
            self.waiting -= 1
            if job_id is not None and own is not None:
                del self._of_jobs[job_id]

    async def ahead(self) -> set[str]:
        """Ids of the jobs that have outcomes on a stream which have not been read yet."""
        return set().union(*await asyncio.gather(*(stream.ahead() for stream in self.streams)))

    def ack(self, replies: list[Reply]) -> None:
        """Have these leave their streams, soon and in batches: the code that took them has come back.

        Nothing is awaited here: a call that has taken an outcome cannot be cancelled before it returns it.
        """
        places: dict[StreamReader, list[Reply]] = {}
        for reply in replies:
            places.setdefault(self._stream_of(reply), []).append(reply)
        for stream, mine in places.items():
            stream.ack(mine)

    def ack_received(self, out: HandOut, crossing: Crossing) -> None:
        """Acknowledge these once the thread that they cross to has them."""
        self.streams[0].ack_received(out, crossing)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Look around when the first of these jobs' deadlines is over; and in a second, if reads wait longer by now."""
        given = list(jobs)
        for stream in self.streams:
            if mine := [job for job in given if stream.has(job.id)]:
                stream.expect(mine)

    def _stream_of(self, reply: Reply) -> StreamReader:
        """Where it was read, whatever job it names: somebody may have written it by hand. Else it was on no stream."""
        read = next((stream for stream in self.streams if stream.has_read(reply)), None)
        return read or next(stream for stream in self.streams if stream.has(reply.outcome.job_id))
