"""The operator's side of dead letters: look at them, submit them again, drop them. Scripts write them (`dead.lua`).

A dead letter's client has been told "dead", and an accepted job has exactly one terminal outcome. So a requeue submits
a *new* job. Its id follows from the letter, so a repeated requeue is still one job. One script accepts the job and
deletes the letter, so a crash leaves either the letter or the job.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ..codec import MINOR, decode
from ..errors import CannotRequeue, ConfigError, InvalidField, MessageError, NoSuchDeadLetter
from ..ids import check_client_id, derived_id
from ..model import DeadLetter, GenerateJob
from ..redis import text, whole
from ..scripts import Scripts, calls
from .broker import Broker

PAGE = 64
HEAD_BYTES = 64
REQUEUED_FROM = "requeued_from"
_ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass(frozen=True, slots=True)
class LetterHead:
    """A dead letter without its payload. size: bytes of it, head: the first 64. at: Unix seconds by Redis' clock.

    dropped: bytes of a payload that was too large to be kept, else 0.
    """

    entry_id: str
    job_id: str
    cause: str
    error: str
    host: str
    attempts: int
    at: float
    size: int
    head: bytes
    dropped: int


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Selects letters: the cause contains `cause` in any case, the job died at or after `since` (Unix seconds by Redis'
    clock) and not after entry `until`. At most `limit` of them."""

    cause: str = ""
    since: float | None = None
    until: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.until is not None:
            _check_entry(self.until)


class DeadLetters:
    """The dead letters of a broker's pool.

    The newest 10,000 are kept, and only as many as fit into a quarter of the pool's bytes (`Caps.nbytes`, as the last
    submission said it): the oldest go first, and `trimmed` counts them.
    """

    def __init__(self, broker: Broker) -> None:
        """Raises ConfigError for a pool with several shards: each has letters of its own, see `Broker.parts`."""
        if len(broker.parts) > 1:
            raise ConfigError(
                f"pool {broker.keys.pool}: each of its {len(broker.parts)} shards has dead letters of its own, and "
                "this looks at one. `rolloutmq status` shows the newest of all shards"
            )
        self._broker = broker
        self._scripts = Scripts(broker.redis, broker.keys)

    async def count(self) -> int:
        """How many letters there are."""
        return int(await self._broker.redis.xlen(self._broker.keys.dead))

    async def trimmed(self) -> int:
        """How many letters have made room for newer ones, since the pool's beginning."""
        return whole(await self._broker.redis.hget(self._broker.keys.load, "trimmed"))

    async def now(self) -> float:
        """Unix seconds by Redis' clock, which stamps the letters."""
        seconds, micros = await self._broker.redis.time()
        return float(seconds + micros / 1e6)

    async def newest_id(self) -> str | None:
        """Entry id of the newest letter."""
        page = await self._page("+", "-", newest_first=True, count=1)
        return page[0].entry_id if page else None

    async def page(self, *, before: str | None = None, count: int = PAGE) -> list[LetterHead]:
        """The newest `count` letters, newest first. before: an entry id, for the next page."""
        if before is not None:
            _check_entry(before)
        return await self._page(f"({before}" if before else "+", "-", newest_first=True, count=count)

    async def find(self, which: DeadFilter, *, newest_first: bool = True) -> AsyncIterator[LetterHead]:
        """The letters that match, read page by page. Letters that come or go meanwhile may be missed."""
        oldest = "-" if which.since is None else str(max(0, int(which.since * 1000)))
        newest = which.until or "+"
        begin, end = (newest, oldest) if newest_first else (oldest, newest)
        left, wanted = which.limit, which.cause.casefold()
        while left is None or left > 0:
            page = await self._page(begin, end, newest_first=newest_first, count=PAGE)
            for letter in page:
                if wanted in letter.cause.casefold():
                    yield letter
                    left = None if left is None else left - 1
                    if left == 0:
                        return
            if len(page) < PAGE:
                return
            begin = f"({page[-1].entry_id}"

    async def get(self, entry_id: str) -> DeadLetter:
        """One letter, whole. Raises NoSuchDeadLetter, or InvalidField for what is no entry id."""
        _check_entry(entry_id)
        entries = await self._broker.redis.xrange(self._broker.keys.dead, entry_id, entry_id)
        if not entries:
            raise _missing(entry_id)
        fields = entries[0][1]
        return DeadLetter(entry_id=entry_id, payload=fields.get(b"payload", b""), **_told(fields))

    async def requeue(self, entry_id: str, *, reply_to: str | None = None) -> str:
        """Submit a letter's job again with all its samples, and delete the letter. Returns the new job's id.

        Results go to the client that submitted the job first, or to `reply_to`. `metadata["requeued_from"]` is the old
        id. A repeated call submits the same job. Raises NoSuchDeadLetter, CannotRequeue, InvalidField, or PoolBusy (the
        letter stays).
        """
        if reply_to is not None:
            check_client_id("reply_to", reply_to)
        job = successor(await self.get(entry_id), reply_to)
        (state,) = await self._broker.enqueue([job], letter=entry_id)
        if state == "gone":
            raise _missing(entry_id)
        return job.id

    async def drop(self, entry_id: str) -> None:
        """Delete a letter. Raises NoSuchDeadLetter, or InvalidField for what is no entry id."""
        _check_entry(entry_id)
        if not await self._scripts.run(calls.drop_letter(entry_id)):
            raise _missing(entry_id)

    async def _page(self, begin: str, end: str, *, newest_first: bool, count: int) -> list[LetterHead]:
        """`count` letters, fewer only if there are no more. One call gives fewer where payloads are large."""
        found: list[LetterHead] = []
        while len(found) < count:
            call = calls.dead_page(int(newest_first), begin, end, count - len(found), HEAD_BYTES)
            raw = await self._scripts.run(call)
            if not raw:
                break
            found += [
                LetterHead(
                    entry_id=raw[i].decode(),
                    size=raw[i + 1],
                    head=raw[i + 2],
                    **_told(dict(zip(raw[i + 3][::2], raw[i + 3][1::2], strict=True))),
                )
                for i in range(0, len(raw), 4)
            ]
            begin = f"({found[-1].entry_id}"
        return found


def successor(letter: DeadLetter, reply_to: str | None = None) -> GenerateJob:
    """The job that a requeue of `letter` submits. Raises CannotRequeue."""
    where = f"dead letter {letter.entry_id} (job {letter.job_id})"
    if letter.dropped:
        raise CannotRequeue(f"{where} has no payload: {letter.dropped} bytes were too many to be kept. Submit it anew")
    try:
        job = decode(letter.payload, GenerateJob)
        if letter.payload[1] > MINOR:  # decoding drops fields that this side does not know
            raise CannotRequeue(f"{where} was written by a newer release: requeue it with that one")
        fields: dict[str, Any] = {name: getattr(job, name) for name in job.model_fields_set}
        fields["id"] = successor_id(letter.entry_id, letter.job_id)
        fields["metadata"] = job.metadata | {REQUEUED_FROM: letter.job_id}
        fields["reply_to"] = reply_to or job.reply_to
        if not fields["reply_to"]:
            raise CannotRequeue(f"{where} names no client that its results could go to: say which (reply_to)")
        return GenerateJob.build(**fields)
    except MessageError as error:
        raise CannotRequeue(f"{where} is not a job that can be submitted: {type(error).__name__}: {error}") from error


def successor_id(entry_id: str, job_id: str) -> str:
    """The id of the job that replaces a letter. It depends on the letter alone and carries the letter's time."""
    digest = hashlib.sha256(f"{entry_id} {job_id}".encode()).digest()
    return derived_id(int(entry_id.partition("-")[0]), digest)


_TEXTS = {"job_id": b"id", "cause": b"cause", "error": b"error", "host": b"host"}


def _told(fields: dict[bytes, bytes]) -> dict[str, Any]:
    """A letter without its payload. Missing fields are left empty, so an odd letter does not hide the others."""

    texts = {name: text(fields.get(field)) for name, field in _TEXTS.items()}
    attempts, at, dropped = (whole(fields.get(name)) for name in (b"attempts", b"at", b"dropped"))
    return texts | {"attempts": attempts, "at": at / 1000, "dropped": dropped}


def _check_entry(entry_id: str) -> None:
    if not _ENTRY_ID.fullmatch(entry_id):
        raise InvalidField(
            "entry_id", entry_id, "the id of a dead letter, such as 1718000000000-0 (dead list shows them)"
        )


def _missing(entry_id: str) -> NoSuchDeadLetter:
    return NoSuchDeadLetter(f"no dead letter {entry_id}: it was requeued or dropped, or newer ones have pushed it out")
