"""Reads a reply stream into the inbox, and acknowledges what was taken from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

from redis.asyncio import Redis
from redis.exceptions import RedisError

from ...messages.broker import Broker, Frames, Receipt, Reply
from ...messages.codec import Job
from ...messages.errors import ClientReplaced
from ...messages.journal import Consumed, Journal
from ...messages.model import GenerateJob, JobFailure
from .handover import Crossing, HandOut
from .inbox import Inbox
from .tracked import Tracked, place_of

log = logging.getLogger(__name__)
READ_COUNT = 512
READ_BYTES = 16 << 20
"""Most bytes of one read, estimated from the read before: results can be large."""
FIRST_BLOCK_MS, LONGEST_BLOCK_MS = 1000, 20_000
"""A read of the stream waits for so long; twice as long each time that nothing came."""
LOOK_S = 1.0
LOOKS = 32
"""A look asks for the states of so many of the newest jobs, which are those that a Redis without its last writes has
lost, and of as many others by turns. If one is missing the look goes on until it has asked for all."""
ALL_LOOKS = 1024
NO_ENTRY = "0-0"
"""Of an outcome that was on no stream."""
LOST = "Redis has lost what came of it: the client's reply stream was deleted, or Redis lost its last writes"
TRIP_S = 0.1
"""A deadline begins when Redis has the job: about so much later than here."""
ACK_S = 0.5
"""What was taken is acknowledged after so many seconds, or when the next results come."""
RETRY_S = 0.2


class StreamReader:
    """Reads one client's stream of one shard, in a task of its own, and acknowledges what was taken.

    After a failover the stream may be a little older than what was read. Then entries come again, which are known by
    job and sample; or new entries get ids below those that were read, which shows in the number of entries. An entry
    that came again leaves the stream together with the first one: it may be all that the new server has of the outcome.

    While nothing comes, reads wait longer and longer: a client that waits costs Redis next to nothing. After each wait
    without an answer it looks around. It also does so when a deadline of its own jobs is over.
    """

    def __init__(
        self,
        broker: Broker,
        blocking: Redis,
        client_id: str,
        inbox: Inbox,
        *,
        before_ack: Callable[[bool], bool] | None,
        journal: Journal | None,
        changed: Callable[[], None],
    ) -> None:
        """blocking: for reads that wait. journal: gets each outcome when it is read for the first time, and when it has
        left the stream. changed(): called when something has come, or the reading has ended."""
        self._before_ack, self._journal, self._changed = before_ack, journal, changed
        self._broker, self._blocking, self._client_id, self._inbox = broker, blocking, client_id, inbox
        self._task: asyncio.Task[None] | None = None
        self._acks: list[Receipt] = []
        self._consumed: list[Consumed] = []  # what they acknowledge, for the journal
        self._crossing: list[tuple[Crossing, HandOut]] = []
        self._flushing: asyncio.Task[None] | None = None
        self._ack_timer: asyncio.TimerHandle | None = None
        self._look_timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._block_ms = FIRST_BLOCK_MS
        self._unacked: set[str] = set()  # entries on the stream that were read
        self._held: dict[tuple[str, int], list[Receipt]] = {}  # outcomes nobody has acknowledged -> entries that repeat
        # Jobs that wait here of which, as the last look found, nothing more will come on the stream, because Redis had
        # ended or forgotten them. _at_the_end: all of it was read since. _turn: the last job that was asked for.
        self._over: set[str] = set()
        self._turn = 0
        self._at_the_end = False
        self._looked_at = time.monotonic()
        self._last, self._owner = "0", ""
        self._count = 16
        self.broken: BaseException | None = None
        """What ended the reading, if anything has."""
        self._closed = False

    async def begin(self) -> tuple[dict[str, str], dict[str, GenerateJob]]:
        """Take the stream over, and read what is on it. Returns the jobs that were open before that, with their groups,
        and those of them that could be read."""
        self._owner = await self._broker.own_replies(self._client_id)
        open_jobs = await self._broker.open_jobs(self._client_id)
        known = await self._broker.submitted(open_jobs)
        frames = self._frames()
        while replies := await self._broker.read_replies(self._client_id, self._last, count=self._count, frames=frames):
            self._take_in(replies, frames)
            frames = self._frames()
        return open_jobs, known

    def start(self) -> None:
        """Read on in the background."""
        self._task = asyncio.create_task(self._read())
        self._look_at_the_next_deadline()

    @property
    def reading(self) -> bool:
        return self._task is not None

    async def close(self) -> None:
        """Stop reading, and acknowledge what was taken."""
        self._closed = True
        for timer in (self._ack_timer, self._look_timer):
            if timer is not None:
                timer.cancel()
        tasks = [task for task in (self._task, self._looking, self._flushing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None
        try:
            await self._flush_acks()
        except ClientReplaced as replaced:  # the one that reads now gets these, too
            log.warning("%s: %d outcomes that this client had taken come there again", replaced, len(self._acks))

    def has(self, job_id: str) -> bool:
        """Whether the outcomes of this job come on this reader's stream."""
        return self._broker.has(job_id)

    def has_read(self, reply: Reply) -> bool:
        """Whether the outcome was on this reader's stream, and is not acknowledged."""
        return place_of(reply) in self._held

    async def ahead(self) -> set[str]:
        """Ids of the jobs that have outcomes on the stream which have not been read yet."""
        place, found = self._last, set[str]()
        while replies := await self._broker.read_replies(self._client_id, place, count=self._count):
            found.update(reply.outcome.job_id for reply in replies)
            place = replies[-1].entry_id
        return found

    def ack(self, replies: list[Reply]) -> None:
        """See ReplyReader.ack; all of these were on this stream, or on none."""
        for reply in replies:
            self._acks.append(Receipt(reply.entry_id, reply.nbytes))
            self._acks += self._held.pop(place_of(reply), ())
        if self._journal is not None:
            self._consumed += [Consumed.of(reply.outcome) for reply in replies]
        if len(self._acks) >= READ_COUNT:
            self._flush_now()
        else:
            self._flush_soon()

    def ack_received(self, out: HandOut, crossing: Crossing) -> None:
        """See ReplyReader.ack_received."""
        self._crossing.append((crossing, out))
        self._flush_soon()

    def expect(self, jobs: Iterable[Job]) -> None:
        """See ReplyReader.expect."""
        long, self._block_ms = self._block_ms > FIRST_BLOCK_MS, FIRST_BLOCK_MS
        deadlines = [job.deadline_s + TRIP_S for job in jobs if job.deadline_s is not None]
        if long or deadlines:
            self._look_within(min([LOOK_S] * long + deadlines))

    # --- inside ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                await self._flush_acks()
                frames = self._frames()
                try:
                    replies = await self._broker.read_replies(
                        self._client_id,
                        self._last,
                        count=self._count,
                        block_ms=self._block_ms,
                        redis=self._blocking,
                        owner=self._owner,
                        frames=frames,
                    )
                    self._block_ms = FIRST_BLOCK_MS if replies else min(2 * self._block_ms, LONGEST_BLOCK_MS)
                    self._at_the_end = self._at_the_end or len(replies) < self._count
                    if replies:
                        self._take_in(replies, frames)
                        self._changed()
                    # Seldom while results keep coming: one of many jobs may have been lost.
                    late = time.monotonic() - self._looked_at >= LONGEST_BLOCK_MS / 1000
                    if self._inbox.jobs and (late or not replies):
                        await self._look_around(waited=not replies)
                except (RedisError, OSError) as error:
                    log.warning("results cannot be read: %s", error)
                    await asyncio.sleep(RETRY_S)
                    self._block_ms = FIRST_BLOCK_MS
                    self._last = "0"  # after a failover the new server may not know what was acknowledged
                    self._count = max(1, self._count // 2)  # the reply may have been too large to read in time
        except BaseException as error:  # also what `before_ack` raises: whoever waits is told
            if self._closed:
                raise
            self._break(error)

    def _flush_soon(self) -> None:
        if self._ack_timer is None and not self._closed:
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_S, self._flush_now)

    def _flush_now(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            await self._flush_acks()
        except BaseException as error:
            if self._closed:
                raise
            self._break(error)
        if self._acks or self._crossing:
            self._flush_soon()

    def _break(self, error: BaseException) -> None:
        self.broken = error
        self._changed()

    def _look_within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._look_timer is not None:
            if self._look_timer.when() <= loop.time() + seconds:
                return
            self._look_timer.cancel()
        self._look_timer = loop.call_later(seconds, self._look)

    def _look_at_the_next_deadline(self) -> None:
        if (due := self._inbox.due()) is not None:
            self._look_within(max(LOOK_S, due + TRIP_S - time.monotonic()))

    def _look(self) -> None:
        self._look_timer = None
        self._looking = asyncio.create_task(self._end_overdue())

    async def _end_overdue(self) -> None:
        if self._closed or not self._inbox.jobs:
            return
        with contextlib.suppress(RedisError, OSError):
            await self._broker.end_overdue()
        self._look_at_the_next_deadline()

    async def _look_around(self, waited: bool) -> None:
        # In a pool without workers nobody else watches the clock, nor ends jobs whose deadline has passed.
        self._looked_at = time.monotonic()
        newest, count = await self._broker.look_around(self._client_id)
        waiting, over = dict[str, Tracked](), set[str]()
        for asked in self._turns():
            waiting |= asked
            states = await self._broker.states(list(asked))
            self._inbox.accepted(job_id for job_id, state in states.items() if state)
            # One that Redis does not know may be on its way there, unless it was there before.
            missed = {job_id for job_id, state in states.items() if not state and waiting[job_id].accepted}
            over |= missed | {job_id for job_id, state in states.items() if state not in {"", "q", "r"}}
            if not missed:
                break
        for job_id in over & self._over if self._at_the_end else ():
            failure = JobFailure(job_id=job_id, group_id=waiting[job_id].group_id, outcome="dead", cause=LOST)
            if self._inbox.put(Reply(NO_ENTRY, failure, last=True)):
                if self._journal is not None:
                    self._journal.outcome(failure, self._client_id)
                self._changed()
        self._over = over
        unread = (newest and newest not in self._unacked) or count > len(self._unacked)
        if over or (waited and unread):
            self._last = "0"  # some entries have ids below those that were read: read all of them
            self._at_the_end, self._block_ms = False, FIRST_BLOCK_MS

    def _turns(self) -> Iterator[dict[str, Tracked]]:
        """Jobs to ask for: those that were over before, the newest and the next ones in turn; then all others."""
        mine = partial(filter, lambda it: self.has(it.job_id))  # lazily: there may be very many
        before = [it for it in map(self._inbox.tracked, self._over) if it is not None and not it.ended]
        turn = list(islice(mine(self._inbox.open()), self._turn, self._turn + LOOKS))
        self._turn = self._turn + LOOKS if turn else 0
        first = {it.job_id: it for it in (*before, *islice(mine(self._inbox.open(newest=True)), LOOKS), *turn)}
        yield first
        rest = [it for it in mine(self._inbox.open()) if it.job_id not in first]
        for place in range(0, len(rest), ALL_LOOKS):
            yield {it.job_id: it for it in rest[place : place + ALL_LOOKS]}

    def _frames(self) -> Frames | None:
        return None if self._journal is None else []

    def _take_in(self, replies: list[Reply], frames: Frames | None) -> None:
        self._last = replies[-1].entry_id
        mean = sum(reply.nbytes for reply in replies) // len(replies) + 1
        self._count = max(1, min(READ_COUNT, READ_BYTES // mean))
        fresh: list[int] = []
        for number, reply in enumerate(replies):
            if reply.entry_id in self._unacked:
                continue
            self._unacked.add(reply.entry_id)
            place = place_of(reply)
            if self._inbox.put(reply):
                self._held.setdefault(place, [])
                fresh.append(number)
            else:
                self._held.get(place, self._acks).append(Receipt(reply.entry_id, reply.nbytes))
        if self._journal is not None and frames is not None:
            outcomes, kept = [replies[it].outcome for it in fresh], [frames[it] for it in fresh]
            self._journal.outcomes(outcomes, self._client_id, kept)

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
        consumed, self._consumed = self._consumed, []
        try:
            await self._broker.ack(self._client_id, acks, self._owner)
        except BaseException as error:  # also when cancelled: they are still to be sent
            self._acks, self._consumed = acks + self._acks, consumed + self._consumed
            if not isinstance(error, RedisError | OSError):
                raise
        else:
            self._unacked.difference_update(reply.entry_id for reply in acks)
            if self._journal is not None:
                self._journal.consumed(consumed, self._client_id)
