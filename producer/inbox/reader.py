"""Reads the reply stream into the inboxes, and acknowledges what was taken from them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import Broker, Receipt, Reply
from ...messages.errors import ClientReplaced, RolloutMQError, WaitTimeout, WrongProcess
from .handover import Crossing, HandOut
from .inboxes import Inboxes

log = logging.getLogger(__name__)
READ_COUNT = 512
READ_BYTES = 16 << 20
"""Most bytes of one read, estimated from the read before: results can be large."""
BLOCK_MS = 1000
RETRY_S = 0.2


class ReplyReader:
    """Reads one client's stream, in a task of its own, and acknowledges what was taken.

    After a failover the stream may be a little older than what was read. Then entries come again, which are known by
    job and sample; or new entries get ids below those that were read, which shows in the number of entries.
    """

    def __init__(
        self,
        broker: Broker,
        blocking: Redis,
        client_id: str,
        inbox: Inboxes,
        before_ack: Callable[[bool], bool] | None = None,
    ) -> None:
        self._before_ack = before_ack
        self._broker, self._blocking, self._client_id, self._inbox = broker, blocking, client_id, inbox
        self._pid = os.getpid()
        self._changed = asyncio.Event()  # set, and replaced, at every change
        self.waiting = 0
        """How many calls wait in `until`."""
        self._task: asyncio.Task[None] | None = None
        self._acks: list[Receipt] = []
        self._crossing: list[tuple[Crossing, HandOut]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._unacked: set[str] = set()  # entries on the stream that were read
        self._last, self._owner = "0", ""
        self._count = 16
        self._broken: BaseException | None = None
        self._closed = False

    async def open(self) -> None:
        """Read what an earlier client of this id had not acknowledged, then go on reading in the background."""
        self._owner = await self._broker.own_replies(self._client_id)
        open_jobs = await self._broker.open_jobs(self._client_id)
        known = await self._broker.submitted(open_jobs)
        while replies := await self._broker.read_replies(self._client_id, self._last, count=self._count):
            self._take_in(replies)
        # In this order: a job that had ended when `open_jobs` was asked has all its outcomes on the stream by now.
        self._inbox.recover(open_jobs, known)
        self.check_open()
        self._task = asyncio.create_task(self._read())

    @property
    def reading(self) -> bool:
        return self._task is not None

    async def close(self) -> None:
        """Stop reading, wake whoever waits, acknowledge what was taken."""
        if os.getpid() != self._pid:
            return  # the connections are the parent's
        self._closed = True
        self.wake()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._flushing is not None:
            await asyncio.gather(self._flushing, return_exceptions=True)
        try:
            await self._flush_acks()
        except ClientReplaced as replaced:  # the one that reads now gets these, too
            log.warning("%s: %d outcomes that this client had taken come there again", replaced, len(self._acks))

    def check_open(self) -> None:
        """Raises RolloutMQError after `close`, WrongProcess in a forked child, ClientReplaced if another one reads."""
        if self._closed:
            raise RolloutMQError(f"client {self._client_id} is closed")
        if os.getpid() != self._pid:
            raise WrongProcess(f"client {self._client_id}", self._pid)
        if isinstance(self._broken, ClientReplaced):
            raise ClientReplaced(self._client_id)

    def wake(self) -> None:
        """Have whoever waits in `until` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, ready: Callable[[], bool], timeout: float | None) -> None:
        """Return once `ready()`, asked whenever something arrives. Raises WaitTimeout, or RolloutMQError if closed."""
        self.waiting += 1
        try:
            async with asyncio.timeout(timeout):
                while True:
                    self.check_open()
                    if ready():
                        return
                    if self._broken is not None:
                        raise RolloutMQError(f"the reader of client {self._client_id} stopped") from self._broken
                    await self._changed.wait()
        except TimeoutError:
            raise WaitTimeout(f"nothing arrived for client {self._client_id} within {timeout} s") from None
        finally:
            self.waiting -= 1

    async def ahead(self) -> set[str]:
        """Ids of the jobs that have outcomes on the stream which have not been read yet."""
        place, found = self._last, set[str]()
        while replies := await self._broker.read_replies(self._client_id, place, count=self._count):
            found.update(reply.outcome.job_id for reply in replies)
            place = replies[-1].entry_id
        return found

    def ack(self, replies: list[Reply]) -> None:
        """Have these leave the stream, soon and in batches: the code that took them has come back.

        Nothing is awaited here: a call that has taken an outcome cannot be cancelled before it returns it.
        """
        self._acks += [Receipt(reply.entry_id, reply.nbytes) for reply in replies]
        if len(self._acks) >= READ_COUNT and (self._flushing is None or self._flushing.done()):
            self._flushing = asyncio.create_task(self._flush_early())

    def ack_received(self, out: HandOut, crossing: Crossing) -> None:
        """Acknowledge these once the thread that they cross to has them."""
        self._crossing.append((crossing, out))

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                await self._flush_acks()
                try:
                    replies = await self._broker.read_replies(
                        self._client_id,
                        self._last,
                        count=self._count,
                        block_ms=BLOCK_MS,
                        redis=self._blocking,
                        owner=self._owner,
                    )
                    if not replies and self._inbox.jobs:
                        await self._look_around()
                except (RedisError, OSError) as error:
                    log.warning("results cannot be read: %s", error)
                    await asyncio.sleep(RETRY_S)
                    self._last = "0"  # after a failover the new server may not know what was acknowledged
                    self._count = max(1, self._count // 2)  # the reply may have been too large to read in time
                    continue
                if replies:
                    self._take_in(replies)
                    self.wake()
        except Exception as error:
            self._break(error)

    async def _flush_early(self) -> None:
        try:
            await self._flush_acks()
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        self._broken = error
        self.wake()

    async def _look_around(self) -> None:
        # In a pool without workers nobody else ends jobs whose deadline has passed.
        await self._broker.end_overdue()
        newest = await self._broker.newest_reply(self._client_id)
        behind = newest is not None and newest not in self._unacked
        if behind or await self._broker.count_replies(self._client_id) > len(self._unacked):
            self._last = "0"  # some entries have ids below those that were read: read all of them

    def _take_in(self, replies: list[Reply]) -> None:
        self._last = replies[-1].entry_id
        mean = sum(reply.nbytes for reply in replies) // len(replies) + 1
        self._count = max(1, min(READ_COUNT, READ_BYTES // mean))
        for reply in replies:
            if reply.entry_id in self._unacked:
                continue
            self._unacked.add(reply.entry_id)
            if not self._inbox.put(reply):
                self._acks.append(Receipt(reply.entry_id, reply.nbytes))

    async def _flush_acks(self) -> None:
        crossed, self._crossing = self._crossing, []
        for crossing, out in crossed:
            if crossing.received:
                out.acknowledge()
            elif not crossing.over:
                self._crossing.append((crossing, out))
        if not self._acks or (self._before_ack is not None and not self._before_ack(self._closed)):
            return
        acks, self._acks = self._acks, []
        try:
            await self._broker.ack(self._client_id, acks, self._owner)
        except BaseException as error:  # also when cancelled: they are still to be sent
            self._acks = acks + self._acks
            if not isinstance(error, RedisError | OSError):
                raise
        else:
            self._unacked.difference_update(reply.entry_id for reply in acks)
