"""Reads of the audit. One script reads each fact in one step, so no change of the pool falls into the middle of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis.asyncio import Redis

from ....messages.redis import Keys
from ....messages.scripts import Scripts, calls

CHUNK = 256
"""A call looks at so many keys, jobs or members."""
SEARCHED = 200_000
"""A call searches through so many suspects, but at least once for one job (some 30 ns each)."""
ADDED_UP = 1000
"""One step adds up the bytes of at most so many open jobs (a few milliseconds)."""
Listed = dict[bytes, tuple[str, ...]]
"""Job id -> "suspects", once per occurrence there."""


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """name: without the prefix. type "none": it is gone. ttl_ms: -1 for none. owned: its worker is registered."""

    name: bytes
    type: str
    ttl_ms: int
    owned: bool


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job's record and its places in the indexes, in the order of the script's reply. places: one per occurrence."""

    id: bytes
    state: str
    klass: str
    owner: str
    client: str
    nbytes: str
    deadline: str
    ttl_ms: int
    held: bool
    leased: bool
    in_deadlines: str
    in_client: bool
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemberFacts:
    """An entry of an index (its key without the prefix) and the record of the job it names."""

    index: str
    id: bytes
    member: bool
    score: str
    state: str
    klass: str
    owner: str
    client: str
    deadline: str


@dataclass(frozen=True, slots=True)
class Totals:
    """load: what the counters say. The others: what was counted; None if there are too many jobs for one step."""

    load: dict[str, int]
    jobs: int
    nbytes: int | None
    saved: int | None
    unread: int
    letters: int

    @property
    def ended(self) -> int:
        return sum(self.load.get(name, 0) for name in ("done", "cancelled", "expired", "dead"))


class Looker:
    """Reads one pool."""

    def __init__(self, redis: Redis, pool: str) -> None:
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self._redis: Any = redis
        self.keys = Keys(pool)
        self._scripts = Scripts(redis, self.keys)

    async def names(self, begin: str = "", kind: str | None = None) -> AsyncIterator[list[bytes]]:
        """The pool's keys without the prefix, in chunks. A key that exists all the time comes at least once."""
        start = (self.keys.prefix + begin).encode()
        pattern = b"".join(b"\\" + bytes([char]) if char in b"*?[]\\" else bytes([char]) for char in start) + b"*"
        cursor, more = 0, {} if kind is None else {"_type": kind}
        while True:
            cursor, found = await self._redis.scan(cursor, match=pattern, count=4 * CHUNK, **more)
            yield [key[len(self.keys.prefix) :] for key in found]
            if cursor == 0:
                return

    async def key_facts(self, names: Sequence[bytes]) -> list[KeyFacts]:
        facts: list[KeyFacts] = []
        for chunk in _chunks(names, CHUNK):
            keys = ((name, _worker_of(name)) for name in chunk)
            raw = await self._scripts.run(calls.audit_keys(*keys))
            facts += [
                KeyFacts(name, raw[i].decode(), raw[i + 1], bool(raw[i + 2]))
                for name, i in zip(chunk, range(0, len(raw), 3), strict=True)
            ]
        return facts

    async def job_facts(self, ids: Iterable[bytes], *, listed: Listed | None) -> list[JobFacts]:
        """listed: what `suspects` read, a moment ago. None: they are searched, in the same step as all the rest."""
        facts: list[JobFacts] = []
        search, size = listed is None, CHUNK
        if search:
            size = max(1, min(CHUNK, SEARCHED // (int(await self._redis.llen(self.keys.suspects)) + 1)))
        for chunk in _chunks(ids, size):
            raw = await self._scripts.run(calls.audit_jobs(int(search), *chunk))
            facts += [_job(job_id, row, (listed or {}).get(job_id, ())) for job_id, row in zip(chunk, raw, strict=True)]
        return facts

    async def suspects(self) -> Listed:
        """Jobs on their last chance. An id that moves meanwhile may be missing or come twice."""
        found, start = Listed(), 0
        while ids := await self._redis.lrange(self.keys.suspects, start, start + 4 * CHUNK - 1):
            for job_id in ids:
                found[job_id] = (*found.get(job_id, ()), "suspects")
            start += len(ids)
        return found

    async def members(self, index: str, kind: str) -> AsyncIterator[list[bytes]]:
        """Ids in an index, in chunks."""
        cursor = 0
        while True:
            if kind == "zset":
                cursor, pairs = await self._redis.zscan(self.keys.prefix + index, cursor, count=CHUNK)
                yield [member for member, _ in pairs]
            else:
                cursor, found = await self._redis.sscan(self.keys.prefix + index, cursor, count=CHUNK)
                yield list(found)
            if cursor == 0:
                return

    async def member_facts(self, index: str, ids: Iterable[bytes]) -> list[MemberFacts]:
        facts: list[MemberFacts] = []
        for chunk in _chunks(ids, CHUNK):
            raw = await self._scripts.run(calls.audit_members(index, *chunk))
            facts += [
                MemberFacts(index, job_id, bool(row[0]), *map(_text, row[1:]))
                for job_id, row in zip(chunk, raw, strict=True)
            ]
        return facts

    async def totals(self, clients: Sequence[bytes]) -> Totals:
        load, jobs, nbytes, saved, unread, letters = await self._scripts.run(calls.audit_totals(ADDED_UP, *clients))
        said = {_text(load[i]): _number(load[i + 1]) for i in range(0, len(load), 2)}
        return Totals(said, jobs, _known(nbytes), _known(saved), unread, letters)

    async def accepted(self) -> int:
        """Jobs ever accepted."""
        return _number(await self._redis.hget(self.keys.load, "accepted") or b"0")


def _known(count: int) -> int | None:
    return None if count < 0 else count


def _worker_of(name: bytes) -> bytes:
    kind, found, worker = name.partition(b":")
    return worker if found and kind in {b"held", b"worker"} else b""


def _job(job_id: bytes, row: list[Any], listed: tuple[str, ...]) -> JobFacts:
    *texts, ttl_ms, held, lease, in_deadlines, in_client, places = row
    found = tuple(_text(places[i]) for i in range(0, len(places), 2) for _ in range(places[i + 1]))
    rest = (bool(held), lease is not None, _text(in_deadlines), bool(in_client), found + listed)
    state, klass, owner, client, nbytes, deadline = map(_text, texts)
    return JobFacts(job_id, state, klass, owner, client, nbytes, deadline, ttl_ms, *rest)


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode(errors="backslashreplace")


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        return 0


def _chunks(items: Iterable[bytes], size: int) -> Iterable[list[bytes]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
