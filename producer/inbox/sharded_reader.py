"""Reads the reply streams of a client in all shards of its pool: a reader for each, which know no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from redis.asyncio import Redis

from ...messages.broker import Broker, Reply
from ...messages.codec import Job
from ...messages.journal import Journal
from .handover import Crossing, HandOut
from .inboxes import Inboxes
from .reader import ReplyReader


def reader_of(
    broker: Broker,
    blocking: Redis,
    client_id: str,
    inbox: Inboxes,
    before_ack: Callable[[bool], bool] | None,
    *,
    journal: Journal | None,
) -> ReplyReader:
    """The reader of a client, over as many shards as its broker. blocking: for blocking reads, as in `ReplyReader`."""
    kind = ReplyReader if len(broker.parts) == 1 else ShardedReader
    return kind(broker, blocking, client_id, inbox, before_ack, journal=journal)


class ShardedReader(ReplyReader):
    """One reader for each shard; all fill the same inboxes. Whoever waits hears of each of them.

    A shard that does not answer delays what is on its stream and nothing else. What is acknowledged goes to the shard
    on whose stream it was.
    """

    def __init__(
        self,
        broker: Broker,
        blocking: Redis,
        client_id: str,
        inbox: Inboxes,
        before_ack: Callable[[bool], bool] | None = None,
        *,
        journal: Journal | None = None,
    ) -> None:
        super().__init__(broker, blocking, client_id, inbox, before_ack, journal=journal)
        clients = getattr(blocking, "shards", ())
        self.readers = [
            ReplyReader(part, client, client_id, inbox, before_ack, journal=journal, woken=self.wake)
            for part, client in zip(broker.parts, clients, strict=True)
        ]

    async def open(self) -> None:
        """Open all of them. Raises RedisUnavailable if one shard does not answer."""
        self._loop = asyncio.get_running_loop()
        found = await asyncio.gather(*(reader.begin() for reader in self.readers))
        open_jobs = {job: group for jobs, _ in found for job, group in jobs.items()}
        self._inbox.recover(open_jobs, {job_id: job for _, known in found for job_id, job in known.items()})
        self.check_open()
        for reader in self.readers:
            reader.start()

    @property
    def reading(self) -> bool:
        return self.readers[-1].reading

    async def close(self) -> None:
        self._closed = True
        first, *others = self.readers
        await first.close()  # it has what crosses to other threads, of all shards
        await asyncio.gather(*(reader.close() for reader in others))
        self.wake()

    def check_open(self) -> None:
        super().check_open()
        for reader in self.readers:
            reader.check_open()

    @property
    def broken(self) -> BaseException | None:
        return next((reader.broken for reader in self.readers if reader.broken is not None), None)

    async def ahead(self) -> set[str]:
        return set().union(*await asyncio.gather(*(reader.ahead() for reader in self.readers)))

    def ack(self, replies: list[Reply]) -> None:
        places: dict[ReplyReader, list[Reply]] = {}
        for reply in replies:
            places.setdefault(self._reader_of(reply), []).append(reply)
        for reader, mine in places.items():
            reader.ack(mine)

    def ack_received(self, out: HandOut, crossing: Crossing) -> None:
        self.readers[0].ack_received(out, crossing)

    def expect(self, jobs: Iterable[Job]) -> None:
        given: Sequence[Job] = list(jobs)
        for reader in self.readers:
            if mine := [job for job in given if reader.has(job.id)]:
                reader.expect(mine)

    def _reader_of(self, reply: Reply) -> ReplyReader:
        """Who read it, whatever job it names: somebody may have written it by hand. Else it was on no stream."""
        read = next((reader for reader in self.readers if reader.has_read(reply)), None)
        return read or next(reader for reader in self.readers if reader.has(reply.outcome.job_id))
