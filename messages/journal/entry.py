"""One thing that happened, as it stands in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ..codec import KINDS, Job, Result, decode_one_of, encode
from ..errors import InvalidField, MalformedMessage
from ..model import JobFailure, Message, RolloutResult

Event = Literal["job", "result", "failure", "announcement", "note", "lost"]
"""What an entry tells of: a job was accepted; a result or a failure arrived; weights were announced; a trainer noted
something about a sample; the writer had to drop entries because the disk was too slow."""
EVENTS: tuple[Event, ...] = get_args(Event)
_SHORT = {"at": "t", "event": "e", "job_id": "j", "client_id": "c", "group_id": "g", "sample": "s", "attempt": "a"}


@dataclass(frozen=True, slots=True)
class Entry:
    """What happened, when, and to which sample.

    event: see `Event`. at: seconds since 1970, by the clock of the process that wrote it. job_id, client_id, group_id:
    empty where they say nothing. sample, attempt: -1 where they say nothing. versions: of the weights, ascending: those
    that sampled a result, or the one that is announced. content: the job, result or announcement, as a message or as
    its frame; see `message`. data: for a failure its fields, for a note what the trainer said; plain data.
    """

    event: Event
    at: float
    job_id: str = ""
    client_id: str = ""
    group_id: str = ""
    sample: int = -1
    attempt: int = -1
    versions: tuple[int, ...] = ()
    content: Message | bytes | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def message(self) -> Message | None:
        """The job, result or announcement itself, with prompt, sampling parameters, tokens, log-probabilities and
        segments. Decoded by each call. Raises MessageError for a frame that is damaged."""
        return decode_one_of(self.content, _MESSAGES) if isinstance(self.content, bytes) else self.content

    def pack(self) -> dict[str, Any]:
        """Plain data for msgpack. Raises InvalidField for a message that cannot be encoded."""
        told = {short: getattr(self, name) for name, short in _SHORT.items()}
        packed = {short: value for short, value in told.items() if value not in ("", -1)}
        if self.versions:
            packed["v"] = list(self.versions)
        if self.content is not None:
            packed["m"] = self.content if isinstance(self.content, bytes) else encode(self.content)
        if self.data:
            packed["d"] = dict(self.data)
        return packed

    @staticmethod
    def unpack(packed: Any) -> Entry:
        """The entry that `pack` made, also by a newer minor version. Raises MessageError."""
        if not isinstance(packed, dict):
            raise MalformedMessage("an entry that is no map")
        told = {name: packed[short] for name, short in _SHORT.items() if short in packed}
        for name, value in told.items():
            kind = {"at": float, "sample": int, "attempt": int}.get(name, str)
            if type(value) is not kind:
                raise MalformedMessage(f"an entry whose {name} is {value!r:.50}")
        versions, frame, data = packed.get("v", []), packed.get("m"), packed.get("d", {})
        if told.get("event") not in EVENTS or "at" not in told:
            raise MalformedMessage(f"an entry of the unknown kind {told.get('event')!r:.50}")
        if not isinstance(versions, list) or not all(type(version) is int for version in versions):
            raise MalformedMessage("an entry whose versions are no integers")
        if not isinstance(data, dict) or not isinstance(frame, bytes | None):
            raise MalformedMessage("an entry whose message or data is of another type")
        return Entry(**told, versions=tuple(versions), content=frame, data=data)


_MESSAGES = tuple(KINDS.values())


def of_job(job: Job, at: float, frame: bytes | None = None) -> Entry:
    """A job that the pool has accepted. frame: the encoded job, if it is there already."""
    return Entry("job", at, job.id, job.reply_to, job.group, content=frame or job)


def of_outcome(outcome: Result | JobFailure, client_id: str, at: float, frame: bytes | None = None) -> Entry:
    """A result or a failure that has arrived at a client. frame: the encoded result, if it is there already."""
    if isinstance(outcome, JobFailure):
        data = outcome.model_dump(exclude_none=True)
        return Entry("failure", at, outcome.job_id, client_id, outcome.group_id, data=data)
    if isinstance(outcome, RolloutResult):
        versions = tuple(sorted({segment.version for segment in outcome.segments}))
    else:
        versions = (outcome.version,)
    place = (outcome.job_id, client_id, outcome.group_id, outcome.sample, outcome.attempt)
    return Entry("result", at, *place, versions, frame or outcome)


def note(job_id: str, sample: int, attempt: int, data: Mapping[str, Any], at: float) -> Entry:
    """What a trainer has to say of a sample. Raises InvalidField if it is no plain data."""
    if not isinstance(job_id, str) or not job_id:
        raise InvalidField("job_id", job_id, "a job's id")
    if not all(isinstance(name, str) for name in data):
        raise InvalidField("data", data, "names with plain data")
    return Entry("note", at, job_id, sample=sample, attempt=attempt, data=data)
