"""What a job generates, while it does: deltas of its samples until all of them are there."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Protocol

from ...messages.broker import Broker
from ...messages.errors import JobFailed, RolloutMQError
from ...messages.model import JobFailure, RolloutResult
from ..inbox import Inbox, News, ReplyReader, as_failure
from .delta import Delta, Watched

Until = Callable[[Callable[[], bool], float | None], Awaitable[None]]


class Submitted(Protocol):
    """What is needed of a JobHandle."""

    @property
    def job_id(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def state(self) -> str: ...


class Streams:
    """A client's streamed jobs. until(condition, timeout): returns once it holds, or raises WaitTimeout."""

    def __init__(self, broker: Broker, news: News, inbox: Inbox, reader: ReplyReader, until: Until) -> None:
        self._broker, self._news, self._inbox, self._reader, self._until = broker, news, inbox, reader, until

    async def close(self) -> None:
        """Stop listening; who still iterates gets a RolloutMQError."""
        await self._news.close()

    async def of(
        self, job_id: str, submitted: Callable[[], Awaitable[Submitted]], timeout: float | None
    ) -> AsyncGenerator[Delta]:
        """See RolloutClient.stream. submitted(): the job's handle; called when its outcomes are kept for this."""
        try:
            with self._inbox.reserved(job_id), self._news.follow(job_id):
                job = await submitted()
                async for delta in self._deltas(job, timeout):
                    yield delta
        finally:
            await self._reader.notify()  # what the stream leaves is there for others now

    async def _deltas(self, job: Submitted, timeout: float | None) -> AsyncGenerator[Delta]:
        inbox, news, job_id = self._inbox, self._news, job.job_id
        watched = {sample: Watched(job_id, sample) for sample in range(job.n)}
        came = time.monotonic()
        while True:
            # Of the time since something came: where nothing is heard there is a look all the same, every second.
            left = None if timeout is None else max(0.0, came + timeout - time.monotonic())
            await self._until(lambda: news.fresh(job_id) or inbox.has_of(job_id), left)
            if (tracked := inbox.tracked(job_id)) is None:
                raise _nothing_left(job)
            if news.fresh(job_id):
                news.looked(job_id)
                async for delta in self._saved(job_id, watched):
                    yield delta
                    came = time.monotonic()
            ended = tracked.ended
            while replies := inbox.take_job(job_id, 1):  # one by one: what is not reached stays for others
                (reply,) = replies
                outcome = reply.outcome
                if isinstance(outcome, JobFailure):
                    await self._reader.ack([reply])
                    raise JobFailed(outcome)
                assert isinstance(outcome, RolloutResult)
                if (one := watched.pop(outcome.sample, None)) is not None:
                    yield one.finish(outcome)
                await self._reader.ack([reply])
                came = time.monotonic()
            if ended:
                return

    async def _saved(self, job_id: str, watched: dict[int, Watched]) -> AsyncIterator[Delta]:
        """What there is of these samples beyond what was shown."""
        look = list(watched)
        while look:
            found = await self._broker.read_pieces(job_id, {sample: watched[sample].place for sample in look})
            look = []
            for sample, pieces in found.items():
                delta, more = watched[sample].take(pieces)
                if more:
                    look.append(sample)
                if delta is not None:
                    yield delta


def _nothing_left(job: Submitted) -> Exception:
    if job.state not in {"new", "q", "r"}:
        return JobFailed(as_failure(job.job_id, job.state))
    return RolloutMQError(f"nothing is outstanding of job {job.job_id}: what came of it was taken before")
