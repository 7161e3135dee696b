"""What stands on a reply stream, and on a client's news, as the client reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from ..codec import RESULTS, Result, decode_one_of
from ..errors import MessageError
from ..model import JobFailure
from ..redis import ENTRY, ENTRY_BYTES, text

Frames = list[bytes | None]
"""Encoded messages; None where there is none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One entry of a reply stream; it stays there until `Broker.ack`.

    last: the job has no further outcomes. nbytes: its share of the client's unread bytes.
    """

    entry_id: str
    outcome: Result | JobFailure
    last: bool
    nbytes: int = 0


class News(NamedTuple):
    """place: where to read on. jobs: those with new pieces. more: there may be further news, or some were lost."""

    place: str
    jobs: frozenset[str]
    more: bool


class Receipt(NamedTuple):
    """A Reply without its outcome: what an acknowledgement needs."""

    entry_id: str
    nbytes: int


def as_replies(entries: Iterable[tuple[bytes, dict[bytes, bytes]]], frames: Frames | None = None) -> list[Reply]:
    """The entries of a stream. frames: gets the encoded result of each, None of a failure."""
    replies = []
    for entry_id, fields in entries:
        named = {text(name): value for name, value in fields.items()}
        replies.append(Reply(entry_id.decode(), as_outcome(named), named.get(ENTRY.last) != b"0", counted(named)))
        if frames is not None:
            frames.append(named.get(ENTRY.result))
    return replies


def counted(fields: dict[str, bytes]) -> int:
    told = (ENTRY.result, ENTRY.cause, ENTRY.host, ENTRY.error)
    return ENTRY_BYTES + sum(len(fields.get(name, b"")) for name in told)


def as_outcome(fields: dict[str, bytes]) -> Result | JobFailure:
    job_id = text(fields.get(ENTRY.job))
    if ENTRY.result in fields:
        try:
            return decode_one_of(fields[ENTRY.result], RESULTS)
        except MessageError as error:
            return JobFailure(job_id=job_id, outcome="dead", cause="a result cannot be read", error=str(error))
    raw: dict[str, Any] = {name: text(fields.get(short)) for name, short in _FAILURE.items()}
    try:
        return JobFailure(job_id=job_id, **raw)
    except ValidationError as error:
        return JobFailure(job_id=job_id, outcome="dead", cause="an outcome cannot be read", error=str(error))


_FAILURE = {
    "group_id": ENTRY.group,
    "outcome": ENTRY.outcome,
    "cause": ENTRY.cause,
    "host": ENTRY.host,
    "error": ENTRY.error,
    "attempts": ENTRY.attempts,
    "published": ENTRY.published,
}
