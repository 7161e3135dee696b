"""The producer's side of a pool: submit jobs, cancel them, read outcomes, look at the queue."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from ..codec import MAX_MESSAGE_BYTES, Job, decode
from ..errors import ClientReplaced, InvalidField, MessageError, PoolBusy, RedisRefused
from ..model import GenerateJob, WorkerStatus
from ..redis import ENTRY, Keys, is_wrong_type, piece_field, shard_of, text, whole
from ..scripts import Scripts, calls
from .clock import Witness
from .needs import Waiting, read_waiting
from .pool_load import PoolLoad, read_load
from .records import read_jobs
from .replies import Frames, News, Receipt, Reply, as_replies
from .submissions import BATCH_BYTES, BATCH_JOBS, batches, same_job

SHORT_JOBS = 64
SHORT_BYTES = 1 << 18
"""Jobs that are read back are read so many at once, and only if they are as short as this: no media."""
OVERDUE = 128
NEWS_COUNT = 128
PIECES_COUNT = 16
READER_TTL_S = 86400
ENDED = frozenset({"done", "cancelled", "expired", "dead"})


@dataclass(frozen=True, slots=True)
class Caps:
    """How much of Redis' memory a pool may use. Beyond these limits it answers PoolBusy.

    jobs: open (queued or running) jobs.
    nbytes: payloads of open jobs, results that no client has taken yet, and what unfinished samples have saved, dead
    letters and recorded sessions, each of these three a quarter of it at most.
    unread: results that one client may leave untaken before it can submit more.
    payload: one job, encoded; a larger one is refused before it is sent.
    """

    jobs: int = 1_000_000
    nbytes: int = 4 << 30
    unread: int = 1 << 30
    payload: int = MAX_MESSAGE_BYTES


class Broker:
    """What a producer or an operator does with a pool."""

    def __init__(self, redis: Redis, pool: str, caps: Caps | None = None, *, shard: int = 0, shards: int = 1) -> None:
        """shard: the one of a pool with so many `shards` that this is the broker of; see also `broker_of`."""
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self.redis: Any = redis
        self.keys = Keys(pool, shard)
        self.caps = caps or Caps()
        self.shards = shards
        self._scripts = Scripts(redis, self.keys)
        self._witness = Witness()

    @property
    def parts(self) -> tuple[Broker, ...]:
        """The brokers of all shards of the pool."""
        return (self,)

    def has(self, job_id: str) -> bool:
        """Whether this is the broker of the shard that has this job."""
        return self.shards == 1 or shard_of(job_id, self.shards) == self.keys.shard

    async def enqueue(self, jobs: Sequence[Job], letter: str = "", frames: Frames | None = None) -> list[str]:
        """Accept `jobs` in order. Returns "new" for each, or the state of an earlier submission under the same id:
        q (queued), r (running), done, cancelled, expired or dead.

        letter: entry id of the dead letter that the one job replaces. Accepting the job deletes the letter. If the
        letter is gone already, nothing is accepted, and the state is the job's, or "gone".
        frames: gets the jobs as they were encoded, in order.
        Raises PoolBusy, which says how many jobs were accepted, or InvalidField: for a job over the payload limit, and
        for an id that is open for another client or as another job, or that was another job's which ended within the
        hour. Then nothing of its batch was accepted.
        """
        # All jobs are encoded before the first is sent, so a refused job leaves none of the others in the pool.
        every = list(batches(jobs, self.caps.payload))
        if frames is not None:
            frames += [one.payload for batch in every for one in batch]
        return await self.accept(every, letter)

    async def accept(self, every: Iterable[list[calls.Submission]], letter: str = "") -> list[str]:
        """`enqueue` for jobs that are encoded, in batches."""
        states: list[str] = []
        for given in every:
            batch = given
            caps = (self.caps.jobs, self.caps.nbytes, self.caps.unread)
            try:
                answer = await self._scripts.run(calls.enqueue(*caps, letter, *batch))
                if answer and answer[0] == b"TAKEN":
                    batch = await self._as_open(batch, answer[1:])
                    answer = await self._scripts.run(calls.enqueue(*caps, letter, *batch))
                if answer and answer[0] == b"TAKEN":  # its record is damaged, or it is another one by now
                    raise InvalidField("id", batch[int(answer[1])].job_id, "an id that is not in use")
            except RedisRefused as refused:
                if refused.reason != "memory":
                    raise
                raise PoolBusy(f"pool {self.keys.pool}: {refused}", states, "memory") from refused
            if len(answer) >= 5 and answer[-5] == b"BUSY":
                states.extend(text(state) for state in answer[:-5])
                raise self._busy(answer[-4:], states)
            states.extend(text(state) for state in answer)
        return states

    async def _as_open(self, batch: Sequence[calls.Submission], taken: Sequence[Any]) -> list[calls.Submission]:
        """The batch, with those jobs that are open already as they were sent then.

        The same job may be encoded in two ways, with a field at its default or left out. Raises InvalidField for an id
        of another job.
        """
        batch = list(batch)
        places = [int(place) for place in taken[::3]]
        for place, state in zip(places, taken[1::3], strict=True):
            if text(state) in ENDED:
                allowed = f"not the id of another job, which is {text(state)}: another job needs another id"
                raise InvalidField("id", batch[place].job_id, allowed)
        open_now = await self._read([batch[place].job_id for place in places], "payload")
        for place, found, client in zip(places, open_now, taken[2::3], strict=True):
            one = batch[place]
            if text(client) != one.client:
                raise InvalidField("id", one.job_id, f"not the id of a job that client {text(client)} has open")
            # Without one it has ended since, or is twice in this call.
            first = found.get("payload") or next(other.payload for other in batch if other.job_id == one.job_id)
            if not same_job(first, one.payload):
                raise InvalidField("id", one.job_id, "not the id of another open job: another job needs another id")
            batch[place] = one._replace(payload=first)
        return batch

    def _busy(self, why: Sequence[Any], states: list[str]) -> PoolBusy:
        reason, caps = why[0].decode(), self.caps
        limit = {
            "jobs": f"{why[1]} jobs are open, at most {caps.jobs}",
            "bytes": f"jobs, pieces, results, dead letters and sessions hold {why[2]} bytes, at most {caps.nbytes}",
            "unread": f"this client has not taken {why[3]} bytes of results, at most {caps.unread}: take some first",
        }[reason]
        return PoolBusy(f"pool {self.keys.pool}: {limit}", states, reason)

    async def cancel(self, job_ids: Sequence[str], cause: str = "cancelled by the client") -> list[str]:
        """Cancel jobs. Returns for each "ok", the state in which it had already ended, or "unknown"."""
        states: list[str] = []
        for start in range(0, len(job_ids), BATCH_JOBS):
            answer = await self._scripts.run(calls.cancel(cause, *job_ids[start : start + BATCH_JOBS]))
            states += [text(state) for state in answer]
        return states

    async def stop(self, job_ids: Sequence[str], cause: str = "stopped before it ran") -> list[str]:
        """End jobs with what they have: their unfinished samples are published with finish_reason "abort".

        Returns for each job "ok", the state in which it had already ended, "unknown", or "unbegun": the job had no
        token yet and ends as a cancelled one. A worker that is not listening at that moment goes on, so repeat the call
        until no job is "ok". If the worker dies meanwhile, the next one that claims the job only ends it.
        """
        states: list[str] = []
        for start in range(0, len(job_ids), BATCH_JOBS):
            answer = await self._scripts.run(calls.stop(cause, *job_ids[start : start + BATCH_JOBS]))
            states += [text(state) for state in answer]
        return states

    async def cancel_client(
        self, client_id: str, group_id: str | None = None, cause: str = "cancelled with all its client's jobs"
    ) -> int:
        """Cancel a client's open jobs, or those of one of its groups. Returns how many were cancelled.

        Anybody may call it. The client need not be connected, and reads the outcomes when it is back. A job without a
        group is a group of its own, named by the job's id. Raises InvalidField for an empty group.
        """
        if group_id == "":
            raise InvalidField("group_id", group_id, "a group's name, a job's id, or None for all jobs")
        cursor, cancelled = 0, 0
        while True:
            answer = await self._scripts.run(calls.cancel_client(client_id, group_id or "", cause, cursor, BATCH_JOBS))
            cursor, cancelled = int(answer[0]), cancelled + int(answer[1])
            if cursor == 0:
                return cancelled

    async def open_jobs(self, client_id: str) -> dict[str, str]:
        """A client's queued and running jobs, each with its group."""
        pages = self.redis.sscan_iter(self.keys.client(client_id), count=BATCH_JOBS)  # a page may repeat some
        ids = list(dict.fromkeys([text(job) async for job in pages]))
        found: list[dict[str, bytes]] = []
        for start in range(0, len(ids), BATCH_JOBS):
            found += await self._read(ids[start : start + BATCH_JOBS], "group")
        return {job_id: text(its.get("group")) or job_id for job_id, its in zip(ids, found, strict=True)}

    async def submitted(self, job_ids: Iterable[str]) -> dict[str, GenerateJob]:
        """Of these, the generation jobs that are still open, as they were submitted; not those over SHORT_BYTES."""
        ids, jobs = list(job_ids), dict[str, GenerateJob]()
        for start in range(0, len(ids), SHORT_JOBS):
            some = ids[start : start + SHORT_JOBS]
            sizes = await self._read(some, "nbytes")
            short = [it for it, its in zip(some, sizes, strict=True) if whole(its.get("nbytes")) <= SHORT_BYTES]
            for found in filter(None, await self._read(short, "payload")):
                with contextlib.suppress(MessageError):  # a task, or written by a newer version
                    job = decode(found["payload"], GenerateJob)
                    jobs[job.id] = job
        return jobs

    async def _read(self, job_ids: Sequence[str], *names: str) -> list[dict[str, bytes]]:
        return await read_jobs(self.redis, self.keys, job_ids, *names)

    async def end_overdue(self, budget: int = OVERDUE) -> int:
        """End jobs past their deadline. Returns how many. Workers do this too, but a pool may have no worker."""
        return (await self._look("", budget))[0]

    async def look_around(self, client_id: str) -> tuple[str, int]:
        """What a client does that has waited: watch the pool's clock, `end_overdue` jobs of anybody, and have Redis
        look at some of its own: one whose record is gone or damaged ends, and one that an index has lost is put back.

        Returns the newest entry id of its reply stream, "" for none, and the number of entries there.
        """
        _, newest, count = await self._look(client_id, OVERDUE)
        return newest, count

    async def _look(self, client_id: str, most: int) -> tuple[int, str, int]:
        asked_at = self._witness.now()
        ended, clock, newest, count = await self._scripts.run(calls.overdue(most, *self._witness.says(), client_id))
        self._witness.hears(clock, asked_at)
        return int(ended), text(newest), int(count)

    async def states(self, job_ids: Sequence[str]) -> dict[str, str]:
        """Each job's state: q, r, done, cancelled, expired or dead; "" for a job that Redis does not know."""
        found = await self._read(job_ids, "state")
        return {job_id: text(its.get("state")) for job_id, its in zip(job_ids, found, strict=True)}

    async def own_replies(self, client_id: str) -> str:
        """Become the one reader of a client's reply stream. Returns what `read_replies` takes as `owner`."""
        key = self.keys.reader(client_id)
        try:
            entry = await self.redis.xadd(key, {"r": ""}, maxlen=1, approximate=False)
        except ResponseError:  # no stream, or one that takes no further entry: nobody reads that
            await self.redis.delete(key)
            entry = await self.redis.xadd(key, {"r": ""}, maxlen=1, approximate=False)
        await self.redis.expire(key, READER_TTL_S)
        return str(text(entry))

    async def read_replies(
        self,
        client_id: str,
        after: str,
        *,
        count: int = 256,
        block_ms: int | None = None,
        redis: Redis | None = None,
        owner: str = "",
        frames: Frames | None = None,
    ) -> list[Reply]:
        """Entries of a client's reply stream after entry id `after` ("0" for the first). They stay in the stream.

        block_ms: how long to wait for the first entry. None does not wait. redis: a connection for blocking reads.
        An entry that cannot be decoded becomes a JobFailure, so the others can still be read.
        owner: Raises ClientReplaced, at once also while it waits, if there is a later owner than this one.
        frames: gets the results as they are encoded, one for each reply; None for a failure.
        """
        places = {self.keys.reply(client_id): after} | ({self.keys.reader(client_id): owner} if owner else {})
        reader: Any = redis or self.redis
        try:
            answer = await reader.xread(places, count=count, block=block_ms)
        except ResponseError as error:
            if is_wrong_type(error):
                await self._clear(client_id)
            raise
        found = {text(key): entries for key, entries in answer}
        if self.keys.reader(client_id) in found:
            raise ClientReplaced(client_id)
        return as_replies(found.get(self.keys.reply(client_id), []), frames)

    async def _clear(self, client_id: str) -> None:
        """Have what is no stream out of the client's way: the script sets it aside, if this user may do that."""
        with contextlib.suppress(ResponseError):
            await self._look(client_id, 0)
        for key in (self.keys.reply(client_id), self.keys.reader(client_id)):
            try:
                await self.redis.xlen(key)
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                await self.redis.delete(key)

    async def read_news(self, client_id: str, after: str, *, block_ms: int, redis: Redis) -> News:
        """Jobs with new pieces since entry `after` of the client's news ("0" for all). Waits for `block_ms`.

        redis: a connection for blocking reads.
        """
        reader: Any = redis
        answer = await reader.xread({self.keys.news(client_id): after}, count=NEWS_COUNT, block=block_ms)
        entries: list[tuple[bytes, dict[bytes, bytes]]] = answer[0][1] if answer else []
        jobs = frozenset(text(fields.get(ENTRY.job.encode())) for _, fields in entries)
        return News(entries[-1][0].decode() if entries else after, jobs, len(entries) >= NEWS_COUNT)

    async def read_pieces(
        self, asked: Sequence[tuple[str, Mapping[int, int]]]
    ) -> list[dict[int, list[bytes]] | Exception]:
        """The saved pieces of unfinished samples of several jobs, or why those of a job cannot be read.

        Each sample is mapped to the number of its first piece to read. Returns at most PIECES_COUNT encoded pieces for
        each sample, in order, all read at one moment.
        """
        async with self.redis.pipeline(transaction=False) as pipe:
            for job_id, wanted in asked:
                for sample, first in wanted.items():
                    numbers = range(first, first + PIECES_COUNT)
                    pipe.hmget(self.keys.job(job_id), [piece_field(sample, number) for number in numbers])
            rows = iter(await pipe.execute(raise_on_error=False))
        return [_pieces(wanted, list(islice(rows, len(wanted)))) for _, wanted in asked]

    async def count_replies(self, client_id: str) -> int:
        """Entries on a client's reply stream."""
        return int(await self.redis.xlen(self.keys.reply(client_id)))

    async def ack(self, client_id: str, receipts: Sequence[Receipt | Reply], owner: str = "") -> None:
        """Drop entries from a reply stream. Call it when the client has them safe.

        owner: Raises ClientReplaced, and drops nothing, if there is a later owner than this one.
        """
        for start in range(0, len(receipts), BATCH_JOBS):
            entries = ((it.entry_id, it.nbytes) for it in receipts[start : start + BATCH_JOBS])
            if await self._scripts.run(calls.ack(client_id, owner, *entries)) == b"replaced":
                raise ClientReplaced(client_id)

    async def unread(self) -> dict[str, int]:
        """Bytes of results that wait to be taken, by client."""
        found = self.redis.hscan_iter(self.keys.unread, count=BATCH_JOBS)
        return {text(client): whole(nbytes) async for client, nbytes in found}

    async def drop_replies(self, client_id: str) -> int:
        """Throw away the outcomes of a client that will not come back. Returns how many there were."""
        dropped, count = 0, 1  # then as many at a time as are short enough together
        while replies := await self.read_replies(client_id, "0", count=count):
            await self.ack(client_id, replies)
            dropped += len(replies)
            mean = sum(reply.nbytes for reply in replies) // len(replies) + 1
            count = max(1, min(BATCH_JOBS, BATCH_BYTES // mean))
        return dropped

    async def load(self) -> PoolLoad:
        """How much is queued, open and finished."""
        return await read_load(self.redis, self.keys)

    async def waiting(self) -> list[Waiting]:
        """Jobs that only some workers' engines can do and that wait for these, by what they need."""
        return await read_waiting(self.redis, self.keys)

    async def roster(self) -> int:
        """A number that changes whenever a worker joins or leaves; 0 if none ever has."""
        return whole(await self.redis.hget(self.keys.load, "roster"))

    async def workers(self) -> list[WorkerStatus]:
        """Workers that hold a lease, as of their last heartbeat. A status that cannot be decoded is left out."""
        ids = [text(worker) for worker in await self.redis.zrange(self.keys.workers, 0, -1)]
        statuses: list[WorkerStatus] = []
        for start in range(0, len(ids), BATCH_JOBS):
            async with self.redis.pipeline(transaction=False) as pipe:
                for worker in ids[start : start + BATCH_JOBS]:
                    pipe.hget(self.keys.worker(worker), "status")
                blobs = await pipe.execute()
            for blob in blobs:
                # During an upgrade a status of another major version must not hide the others.
                with contextlib.suppress(MessageError):
                    statuses += [decode(blob, WorkerStatus)] if blob else []
        return statuses


def _pieces(samples: Iterable[int], rows: Sequence[Any]) -> dict[int, list[bytes]] | Exception:
    if refused := next((row for row in rows if isinstance(row, Exception)), None):
        return refused
    return {it: list(takewhile(lambda one: one is not None, row)) for it, row in zip(samples, rows, strict=True)}
