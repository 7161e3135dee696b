"""The reply streams of all of a pool's clients: read from outside, and compared with what Redis counted there."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from ...messages.redis import Keys, PoolRedis, is_wrong_type, name_once, text

CHECK_S, LONGEST_S = 1.0, 32.0
"""A stream is compared after so many seconds, and less and less often while nothing happens on it."""
FORGET_S = 3600.0
"""A client without a stream is forgotten when nothing in Redis has named it for so long."""
READ_COUNT = 256
READ_BYTES = 8 << 20
"""One read asks for so many entries of each stream, and for so many bytes in all, about."""
BEGINNING = "0-0"

Entries = Sequence[tuple[bytes, dict[bytes, bytes]]]


@dataclass(slots=True)
class _Stream:
    """One client's, as far as it was read. A new one is read from its beginning.

    position: the newest entry that was read or told as missed. known: how many entries, of all that were ever added,
    were read or told as missed. named_at: when Redis last named the client. due, pause_s: when the stream is compared
    next, and how long after that. Seconds of time.monotonic.
    """

    position: str = BEGINNING
    known: int = 0
    named_at: float = field(default_factory=time.monotonic)
    due: float = 0.0
    pause_s: float = CHECK_S


@dataclass(frozen=True, slots=True)
class _Count:
    """What Redis says of a stream. added: entries that it ever had; None before Redis 7. first, last: ids; first is ""
    for an empty stream."""

    length: int
    added: int | None
    first: str
    last: str


class ReplyStreams:
    """Follows the streams of those clients that `find` was told of. Nothing is deleted or acknowledged.

    redis, reader: for commands, and for blocking reads. take(client, entries): gets each entry once, in the order of
    its stream, and returns how many bytes these were. missed(client, entries, at start, at least): so many entries were
    acknowledged before they could be read, or before `start`; at least so many, if Redis does not count them.
    All methods raise RedisError, and go on where they were when they are called again.
    """

    def __init__(
        self,
        redis: PoolRedis,
        reader: PoolRedis,
        keys: Keys,
        take: Callable[[str, Entries], Awaitable[int]],
        missed: Callable[[str, int, bool, bool], None],
    ) -> None:
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self._redis: Any = redis
        self._reader: Any = reader
        self._keys, self._on_entries, self._on_missed = keys, take, missed
        self._streams: dict[str, _Stream] = {}
        self._read_count = 16

    @property
    def clients(self) -> list[str]:
        return list(self._streams)

    async def start(self, clients: Collection[str]) -> float:
        """Follow all clients that there are. What was acknowledged by now is told as missed.

        Returns when the oldest entry that is still there was added, in seconds since 1970 by Redis' clock; infinity for
        none.
        """
        oldest = float("inf")
        for client, count in (await self._counts(list(clients))).items():
            stream = self._streams[client] = _Stream()
            if count is None:
                continue
            if count.first:
                oldest = min(oldest, _order(count.first)[0] / 1000)
            if count.added is not None:
                stream.known = before = count.added - count.length
            else:
                before = int(count.length == 0 and count.last != stream.position)
            if before > 0:
                self._on_missed(client, before, True, count.added is None)
        return oldest

    async def find(self, clients: Collection[str]) -> None:
        """Follow those clients that are new. Their streams began after `start`."""
        for client in clients:
            if client in self._streams:
                self._streams[client].named_at = time.monotonic()
        new = [client for client in clients if client not in self._streams]
        for client in await self._counts(new):
            self._streams[client] = _Stream()

    async def follow(self, wait_s: float) -> bool:
        """Take what comes first within `wait_s`. False if there is no stream to wait for."""
        if not self._streams:
            return False
        names = {self._keys.reply(client): client for client in self._streams}
        places = {key: self._streams[client].position for key, client in names.items()}
        answer = await self._reader.xread(places, count=self._read_count, block=max(1, round(wait_s * 1000)))
        for key, entries in answer:
            await self._take(names[text(key)], entries)
        return True

    async def compare(self, *, all_of_them: bool = False) -> None:
        """Compare what was read of each stream that is due with what Redis counted there."""
        now = time.monotonic()
        due = [client for client, stream in self._streams.items() if all_of_them or stream.due <= now]
        for client, count in (await self._counts(due)).items():
            stream = self._streams[client]
            if count is None and now - stream.named_at > FORGET_S:
                del self._streams[client]
                continue
            if count is None or _order(count.last) < _order(stream.position):  # it was deleted, and begins anew
                stream.position, stream.known = BEGINNING, 0
            if count is None or count.last == stream.position:
                stream.pause_s = min(2 * stream.pause_s, LONGEST_S)
            else:
                stream.pause_s = CHECK_S
            stream.due = now + stream.pause_s
            if count is not None:
                await self._catch_up(client, stream, count)

    async def _catch_up(self, client: str, stream: _Stream, count: _Count) -> None:
        """Read all that was there at `count`. What is missing then was acknowledged before."""
        last = _order(count.last)
        while _order(stream.position) < last:
            answer = await self._redis.xread({self._keys.reply(client): stream.position}, count=self._read_count)
            entries = [entry for entry in (answer[0][1] if answer else ()) if _order(entry[0]) <= last]
            if not entries:
                break
            await self._take(client, entries)
        behind = _order(stream.position) < last
        missed = int(behind) if count.added is None else count.added - stream.known
        if missed > 0:
            self._on_missed(client, missed, False, count.added is None)
        if count.added is not None:
            stream.known = count.added  # also of a stream that was deleted and made again between two comparisons
        stream.position = count.last

    async def _take(self, client: str, entries: Entries) -> None:
        stream = self._streams[client]
        nbytes = await self._on_entries(client, entries)
        stream.position = text(entries[-1][0])
        stream.known += len(entries)
        stream.due, stream.pause_s = min(stream.due, time.monotonic() + CHECK_S), CHECK_S
        mean = nbytes // len(entries) + 1
        self._read_count = max(1, min(READ_COUNT, READ_BYTES // mean // len(self._streams)))

    async def _counts(self, clients: Sequence[str]) -> dict[str, _Count | None]:
        """None: there is no stream. A client with something else under its stream's name is left out, and forgotten."""
        if not clients:
            return {}
        async with self._redis.pipeline(transaction=False) as pipe:
            for client in clients:
                pipe.xinfo_stream(self._keys.reply(client))
            answers = await pipe.execute(raise_on_error=False)
        found: dict[str, _Count | None] = {}
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, ResponseError) and "no such key" in str(answer):
                found[client] = None
            elif isinstance(answer, ResponseError) and is_wrong_type(answer):
                name_once(f"{self._keys.reply(client)}: {answer}")
                self._streams.pop(client, None)
            elif isinstance(answer, Exception):
                raise answer
            else:
                first = answer["first-entry"]
                last = text(answer["last-generated-id"])
                found[client] = _Count(
                    answer["length"], answer.get("entries-added"), text(first[0]) if first else "", last
                )
        return found


def _order(entry_id: bytes | str) -> tuple[int, ...]:
    return tuple(int(part) for part in (text(entry_id) if isinstance(entry_id, bytes) else entry_id).split("-"))
