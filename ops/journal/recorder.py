"""The recorder: follows a pool from outside and writes its journal. It reads from Redis and changes nothing there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from ...messages.broker import Frames, as_replies
from ...messages.codec import decode
from ...messages.errors import ConfigError, MessageError
from ...messages.journal import Entry, Journal, of_announcement, read
from ...messages.model import JobFailure, WeightAnnouncement
from ...messages.redis import Bell, Keys, PoolRedis, Ring, is_wrong_type, text, whole
from ..redis import connected
from .reply_streams import READ_BYTES, READ_COUNT, Entries, ReplyStreams

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""Between two looks for new clients, jobs, workers and weights."""
RETRY_S = 1.0
SCANNED = 1000
"""Keys of Redis, and open jobs of one client, that one look goes through, about."""
FLUSH_BYTES = 16 << 20
"""After so many bytes the recorder waits for the disk. What it has not read stays in Redis meanwhile."""
FLUSH_S = 60.0
TOLD = 100_000
"""Of so many jobs and announcements the recorder remembers that they are in the journal."""
CLOCKS_S = 3600.0
"""The clocks of Redis' host and of earlier recorders may differ by so much."""
LAST_LOOK_S = 5.0


@dataclass(slots=True)
class Recorded:
    """How much was written.

    missed: results that were acknowledged before the recorder read them, as far as Redis counts them. before: those
    that were acknowledged before it began; an earlier recorder may have written them. at_least: there were as many or
    more, because Redis 6.2 does not count them.
    """

    jobs: int = 0
    results: int = 0
    failures: int = 0
    missed: int = 0
    before: int = 0
    at_least: bool = False


class Recorder:
    """Follows one pool. The caller closes the journal."""

    def __init__(self, redis: PoolRedis, pool: str, journal: Journal, folder: Path | str) -> None:
        """folder: the journal's folder or URL, in which earlier recorders may have written."""
        self._redis: Any = redis
        self._keys, self._journal, self._folder = Keys(pool), journal, folder
        reader = redis.reader(2)
        self._bell = Bell(reader, pool)
        self._streams = ReplyStreams(redis, reader, self._keys, self._take, self._missed)
        self.recorded = Recorded()
        self._written: set[tuple[str, int, int]] = set()
        self._told: dict[str, None] = {}  # oldest first
        self._said, self._unflushed = "", 0
        self._look_at, self._cursor = 0.0, 0
        self._turn, self._job_cursors = 0, dict[str, int]()
        self._rung: set[int] = set()
        self._roster: tuple[int, int] | None = None
        self._workers: set[str] = set()

    async def begin(self) -> None:
        """Find all clients, and write what is on their streams. Raises RedisError."""
        await self._bell.open()
        clients, ended = set[str](), False
        while not ended:
            clients |= await self._clients_of_a_scan()
            ended = self._cursor == 0
        oldest = await self._streams.start(clients)
        await asyncio.to_thread(self._read_what_is_written, oldest - CLOCKS_S)
        await self._look()
        self._written.clear()

    async def run(self) -> None:
        """Record until cancelled. While Redis is away it is tried again."""
        listening = asyncio.create_task(self._bell.listen(self._on_ring))
        try:
            while True:
                try:
                    if time.monotonic() >= self._look_at:
                        await self._look()
                    wait_s = max(0.0, self._look_at - time.monotonic())
                    if not await self._streams.follow(wait_s):
                        await asyncio.sleep(wait_s)
                except (RedisError, OSError) as error:
                    self._warn(error)
                    await asyncio.sleep(RETRY_S)
                    with contextlib.suppress(RedisError, OSError):
                        await self._streams.compare(all_of_them=True)
        finally:
            listening.cancel()

    def _warn(self, error: Exception) -> None:
        """The same error is told once."""
        if (said := f"{type(error).__name__}: {error}") != self._said:
            log.warning("the pool cannot be read, and is tried again: %s", said)
            self._said = said

    async def finish(self) -> None:
        """Read what is there and count what was missed, if Redis answers within a few seconds."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(LAST_LOOK_S):
                await self._look()
                await self._streams.compare(all_of_them=True)

    def _read_what_is_written(self, since: float) -> None:
        """What earlier recorders have written of those results that are still on a stream."""
        for place in dict.fromkeys((str(self._folder), str(self._journal.folder))):
            with contextlib.suppress(ConfigError):  # there is nothing yet
                for entry in read(place, since=since, events=("job", "result", "failure"), on_problem=log.info):
                    if entry.event == "job":
                        self._remember([entry.job_id])
                    else:
                        self._written.add((entry.job_id, entry.sample, entry.attempt))

    # --- results and jobs ------------------------------------------------------------------------------------------

    async def _take(self, client: str, entries: Entries) -> int:
        """Write results that are new, and their jobs if these are still there. Returns the bytes of the results."""
        await self._give_the_disk_time()
        await self._take_jobs([text(fields.get(b"j")) for _, fields in entries])
        # Nothing is awaited from here on: what is written counts as read, also if the recorder is stopped.
        frames: Frames = []
        replies = as_replies(entries, frames)
        outcomes, kept = [], Frames()
        for reply, frame, (_, fields) in zip(replies, frames, entries, strict=True):
            outcome = reply.outcome
            if isinstance(outcome, JobFailure):
                place = (outcome.job_id, -1 if frame is None else whole(fields.get(b"s")), -1)
            else:
                place = (outcome.job_id, outcome.sample, outcome.attempt)
            if place in self._written:
                continue
            if isinstance(outcome, JobFailure) and frame is not None:  # a result that this version cannot read
                told = Entry("result", time.time(), place[0], client, sample=place[1], content=frame)
                self._journal.add(told)
                self.recorded.results += 1
                continue
            self.recorded.failures += frame is None
            self.recorded.results += frame is not None
            outcomes.append(outcome)
            kept.append(frame)
        self._journal.outcomes(outcomes, client, kept)
        nbytes = sum(reply.nbytes for reply in replies)
        self._unflushed += nbytes
        return nbytes

    def _missed(self, client: str, entries: int, at_start: bool, at_least: bool) -> None:
        if at_start:
            self.recorded.before += entries
        else:
            self.recorded.missed += entries
        self.recorded.at_least |= at_least
        why = "acknowledged before the recorder " + ("began" if at_start else "read it")
        told = {"entries": entries, "why": why} | ({"at_least": True} if at_least else {})
        self._journal.add(Entry("lost", time.time(), client_id=client, data=told))

    async def _take_jobs(self, job_ids: Iterable[str]) -> None:
        """Write those jobs that are new here and still have their record; one that has ended has none."""
        new = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in self._told]
        for start in range(0, len(new), READ_COUNT):
            asked = new[start : start + READ_COUNT]
            answers = await self._of_jobs(asked, "z")
            sizes = [0 if isinstance(answer, Exception) else whole(answer[0]) for answer in answers]
            self._remember(job_id for job_id, size in zip(asked, sizes, strict=True) if not size)
            some = [job_id for job_id, size in zip(asked, sizes, strict=True) if size]
            sizes = [size for size in sizes if size]
            while some:
                many = _how_many(sizes)
                await self._give_the_disk_time()
                await self._write_jobs(some[:many])
                self._unflushed += sum(sizes[:many])
                some, sizes = some[many:], sizes[many:]

    async def _write_jobs(self, job_ids: Sequence[str]) -> None:
        for job_id, fields in zip(job_ids, await self._of_jobs(job_ids, "p", "y", "G"), strict=True):
            if not isinstance(fields, Exception) and fields[0]:
                payload, client, group = fields[0], text(fields[1]), text(fields[2]) or job_id
                self._journal.add(Entry("job", time.time(), job_id, client, group, content=payload))
                self.recorded.jobs += 1
        self._remember(job_ids)

    async def _of_jobs(self, job_ids: Sequence[str], *fields: str) -> list[Any]:
        """These fields of each job's record, or an exception for what is no record."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hmget(self._keys.job(job_id), *fields)
            return list(await pipe.execute(raise_on_error=False))

    def _remember(self, names: Iterable[str]) -> None:
        self._told.update(dict.fromkeys(names))
        while len(self._told) > TOLD:
            del self._told[next(iter(self._told))]

    async def _give_the_disk_time(self) -> None:
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            await asyncio.to_thread(self._journal.flush, FLUSH_S)

    # --- looks -----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_S
        unread = {text(client) for client in await self._redis.hkeys(self._keys.unread)}
        await self._streams.find(unread | await self._clients_of_a_scan())
        await self._streams.compare()
        await self._look_at_open_jobs()
        await self._look_at_workers()
        await self._look_at_weights()

    async def _clients_of_a_scan(self) -> set[str]:
        """Clients that some of Redis' keys name: those of their open jobs, their readers and their reply streams."""
        self._cursor, keys = await self._redis.scan(self._cursor, match=f"{self._keys.prefix}[cr]*", count=SCANNED)
        starts = (self._keys.client(""), self._keys.reader(""), self._keys.reply(""))
        return {key[len(start) :] for key in map(text, keys) for start in starts if key.startswith(start)}

    async def _look_at_open_jobs(self) -> None:
        """Write open jobs of one client, each time of the next one: Redis has no record of a job that has ended."""
        if clients := self._streams.clients:
            self._turn = (self._turn + 1) % len(clients)
            client = clients[self._turn]
            key, cursor = self._keys.client(client), self._job_cursors.pop(client, 0)
            cursor, job_ids = await self._redis.sscan(key, cursor, count=SCANNED)
            if cursor:
                self._job_cursors[client] = cursor
            await self._take_jobs(map(text, job_ids))

    async def _look_at_workers(self) -> None:
        roster, silent = map(whole, await self._redis.hmget(self._keys.load, "roster", "leases_lost"))
        before, self._roster = self._roster, (roster, silent)
        if before is not None and before[0] == roster:
            return
        there = {text(worker) for worker in await self._redis.zrange(self._keys.workers, 0, -1)}
        came, went = there - self._workers, self._workers - there
        self._workers = there
        lost = 0 if before is None else silent - before[1]
        ended = "left" if lost == 0 else "lease lost" if lost == len(went) else "gone"
        for what, workers in (("present" if before is None else "joined", came), (ended, went)):
            for worker in sorted(workers):
                self._journal.add(Entry("worker", time.time(), data={"what": what, "worker": worker}))

    def _on_ring(self, ring: Ring) -> None:
        epoch = whole(ring.get("epoch", "").encode())
        if ring.get("kind") == "weights" and epoch > 0 and len(self._rung) < READ_COUNT:
            self._rung.add(epoch)

    async def _look_at_weights(self) -> None:
        """Write what was announced, once: the bell also rings when a transfer is sealed and when it ends."""
        while self._rung:
            epoch = min(self._rung)
            key = self._keys.epoch(epoch)
            try:
                frame = None if key in self._told else await self._redis.hget(key, "m")
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                frame = None
            self._rung.discard(epoch)
            if frame is not None:
                self._remember([key])
                with contextlib.suppress(MessageError):
                    announcement = decode(frame, WeightAnnouncement)
                    self._journal.add(of_announcement(announcement, time.time(), frame))


def record_pool(redis_url: str, pool: str, folder: Path | str) -> Recorded:
    """Record a pool into a journal until SIGTERM or SIGINT. Its segment is complete then.

    folder: a folder or a URL, as `Journal` takes it. Raises ConfigError, InvalidField, RedisUnavailable.
    """
    return asyncio.run(_record(redis_url, pool, folder))


async def _record(redis_url: str, pool: str, folder: Path | str) -> Recorded:
    async with connected(redis_url, pool) as redis:
        journal = Journal(folder)
        try:
            recorder = Recorder(redis, pool, journal, folder)
            recording = asyncio.create_task(_begin_and_run(recorder))
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, recording.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await recording
            await recorder.finish()
        finally:
            await asyncio.to_thread(journal.close)
    return recorder.recorded


async def _begin_and_run(recorder: Recorder) -> None:
    await recorder.begin()
    log.info("recording")
    await recorder.run()


def _how_many(sizes: Sequence[int]) -> int:
    """How many of them, at least one, have READ_BYTES together."""
    total = 0
    for number, size in enumerate(sizes):
        total += size
        if number and total > READ_BYTES:
            return number
    return len(sizes)
