"""One thing that happened, as it stands in a journal."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import msgpack
import numpy as np

from ..codec import KINDS, Job, Result, decode_one_of, encode
from ..errors import InvalidField, MalformedMessage, UnsupportedVersion
from ..model import JobFailure, Message, RolloutResult, WeightAnnouncement

Event = Literal[
    "job", "result", "failure", "consumed", "attempt", "announcement", "weights", "worker", "note", "lost"
]  # fmt: skip
"""What an entry tells of. docs/journal.md has a table of them, with what `data` has. "attempt", "weights" and "worker"
are each about several things that happen to one: `data["what"]` says which."""
EVENTS: tuple[Event, ...] = get_args(Event)
_SHORT = {"at": "t", "event": "e", "job_id": "j", "client_id": "c", "group_id": "g", "sample": "s", "attempt": "a"}
Record = dict[str, Any]
"""An entry as plain data for msgpack; under "m" there may still be a message, to be encoded."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What happened, when, and to which sample.

    event: see `Event`. at: seconds since 1970, by the clock of the process that wrote it. job_id, client_id, group_id:
    empty where they say nothing. sample, attempt: -1 where they say nothing. versions: of the weights, ascending: those
    that sampled tokens, or the one that is announced, loaded or committed. content: the job, result or announcement, as
    a message or as its frame; see `message`. data: of a failure its fields, of a note what the trainer said, of other
    events what docs/journal.md lists; plain data, and arrays as read-only numpy arrays.
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
        segments. Decoded by each call. Raises MessageError for a frame that is damaged, UnsupportedVersion for one of a
        newer major version of the messages; the entry's other fields stand all the same."""
        return decode_one_of(self.content, _MESSAGES) if isinstance(self.content, bytes) else self.content

    def pack(self) -> Record:
        """Plain data for msgpack. Raises InvalidField for a message or data that cannot be encoded."""
        told = {short: getattr(self, name) for name, short in _SHORT.items()}
        packed = {short: value for short, value in told.items() if value not in ("", -1)}
        if self.versions:
            packed["v"] = list(self.versions)
        if self.content is not None:
            packed["m"] = self.content if isinstance(self.content, bytes) else encode(self.content)
        if self.data:
            packed["d"] = pack_data(self.data)
        return packed

    @staticmethod
    def unpack(packed: Any) -> Entry:
        """The entry that `pack` made, also by a newer minor version. Raises UnsupportedVersion for a kind of entry that
        this version does not know, MalformedMessage."""
        if not isinstance(packed, dict):
            raise MalformedMessage("an entry that is no map")
        told = {name: packed[short] for name, short in _SHORT.items() if short in packed}
        for name, value in told.items():
            kind = {"at": float, "sample": int, "attempt": int}.get(name, str)
            if type(value) is not kind:
                raise MalformedMessage(f"an entry whose {name} is {value!r:.50}")
            if isinstance(value, int | float) and not abs(value) < _MOST[name]:  # NaN, too
                raise MalformedMessage(f"an entry whose {name} is {value!r:.50}")
        versions, frame, data = packed.get("v", []), packed.get("m"), packed.get("d", {})
        if "event" not in told or "at" not in told:
            raise MalformedMessage("an entry without its kind or time")
        if told["event"] not in EVENTS:
            raise UnsupportedVersion(f"entries of the unknown kind {told['event']!r:.50}; they are left out")
        if not isinstance(versions, list) or not all(type(one) is int and abs(one) < 1 << 63 for one in versions):
            raise MalformedMessage("an entry whose versions are no integers of 64 bits")
        if not isinstance(data, dict) or not isinstance(frame, bytes | None):
            raise MalformedMessage("an entry whose message or data is of another type")
        if _is_deep(data):
            raise MalformedMessage(f"an entry whose data is nested deeper than {MAX_DEPTH}")
        data = {name: _array(value) if _is_array(value) else value for name, value in data.items()}
        return Entry(**told, versions=tuple(versions), content=frame, data=data)


_MESSAGES = tuple(KINDS.values())
MAX_DEPTH = 64
"""The deepest nesting of data, because readers walk through it recursively."""
MAX_ELEMENTS = 1 << 20
"""Of an entry's data. Readers bound those of a block."""
_MOST = {"at": 6e10, "sample": 1 << 31, "attempt": 1 << 31}
"""What is below has a date, and a place in a table's column of 32 bits."""

# --- records of what happens most, made without an Entry: this runs for every job and every result -------------------


def of_jobs(jobs: Sequence[Job], frames: Sequence[bytes | None], at: float) -> Iterable[Record]:
    """Jobs that the pool has accepted. frames: the encoded jobs, as far as they are there already."""
    for job, frame in zip(jobs, frames, strict=True):
        yield {"t": at, "e": "job", "j": job.id, "c": job.reply_to, "g": job.group, "m": frame or job}


def of_outcomes(
    outcomes: Sequence[Result | JobFailure], frames: Sequence[bytes | None], client_id: str, at: float
) -> Iterable[Record]:
    """Results and failures that have arrived at a client. frames: the encoded results, as far as they are there."""
    for outcome, frame in zip(outcomes, frames, strict=True):
        if isinstance(outcome, JobFailure):
            told = outcome.model_dump(exclude_none=True)
            yield {"t": at, "e": "failure", "j": outcome.job_id, "c": client_id, "g": outcome.group_id, "d": told}
        else:
            yield {
                "t": at, "e": "result", "j": outcome.job_id, "c": client_id, "g": outcome.group_id,
                "s": outcome.sample, "a": outcome.attempt, "v": versions_of(outcome), "m": frame or outcome,
            }  # fmt: skip


class Consumed(NamedTuple):
    """Which outcome a client has acknowledged. sample, attempt: -1 of a failure."""

    job_id: str
    sample: int
    attempt: int

    @staticmethod
    def of(outcome: Result | JobFailure) -> Consumed:
        if isinstance(outcome, JobFailure):
            return Consumed(outcome.job_id, -1, -1)
        return Consumed(outcome.job_id, outcome.sample, outcome.attempt)


def of_consumed(outcomes: Sequence[Consumed], client_id: str, at: float) -> Iterable[Record]:
    """Results and failures that their client has acknowledged."""
    for one in outcomes:
        record = {"t": at, "e": "consumed", "j": one.job_id, "c": client_id}
        yield record if one.sample < 0 else record | {"s": one.sample, "a": one.attempt}


def attempt_record(
    job_id: str,
    attempt: int,
    data: dict[str, Any],
    *,
    sample: int | None = None,
    versions: Sequence[int] = (),
    ago_s: float = 0.0,
) -> Record:
    """Something that happened to one attempt of a job, or to a sample of it, `ago_s` seconds ago. data: its `what`, and
    more."""
    record = {"t": time.time() - ago_s, "e": "attempt", "j": job_id, "a": attempt, "v": versions, "d": data}
    return record if sample is None else record | {"s": sample}


def versions_of(result: Result) -> list[int]:
    """The weights versions that sampled a result, ascending."""
    if not isinstance(result, RolloutResult):
        return [result.version]
    return [version for version, _ in result.segments] if len(result.segments) < 2 else sorted({*result.versions})


# --- what trainers, workers and publishers say -----------------------------------------------------------------------


def of_announcement(announcement: WeightAnnouncement, at: float) -> Entry:
    """Weights were announced to the pool."""
    return Entry("announcement", at, versions=(announcement.version,), content=announcement)


def pack_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data; arrays become their bytes. Raises InvalidField for what is neither."""
    if not all(isinstance(name, str) for name in data):
        raise InvalidField("data", data, "names with plain data")
    packed = {name: _pack_array(name, value) if hasattr(value, "__array__") else value for name, value in data.items()}
    try:
        msgpack.packb(packed)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidField("data", data, f"plain data: {error}") from None
    if _is_deep(packed):
        raise InvalidField("data", data, f"plain data, nested at most {MAX_DEPTH} deep")
    if _elements(packed) > MAX_ELEMENTS:
        raise InvalidField("data", data, f"at most {MAX_ELEMENTS} elements of lists and maps, or an array")
    return packed


def _elements(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value
    return len(value) + sum(_elements(one) for one in inside if isinstance(one, dict | list | tuple))


def _is_deep(value: Any, left: int = MAX_DEPTH) -> bool:
    """Whether lists and maps are nested deeper than readers can walk."""
    inside = value.values() if isinstance(value, dict) else value
    return any(isinstance(one, dict | list | tuple) and (not left or _is_deep(one, left - 1)) for one in inside)


def _pack_array(name: str, value: Any) -> Any:
    """A number of numpy's as Python's; an array as its type, shape and bytes, floats as float32."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU, or with a gradient
        raise InvalidField(name, value, f"an array that numpy can read: {error}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidField(name, value, "an array of numbers")
    if not array.ndim:
        return array.item()
    wide = array.dtype.kind == "f" and array.dtype.itemsize > 4
    array = np.ascontiguousarray(array, np.float32 if wide else array.dtype.newbyteorder("<"))
    return {_DTYPE: array.dtype.str, "shape": list(array.shape), "bytes": array.tobytes()}


_DTYPE = "__array__"
_DTYPES = re.compile("[<>|]?[biuf][1248]")


def _is_array(value: Any) -> bool:
    return type(value) is dict and _DTYPE in value


def _array(packed: dict[str, Any]) -> Any:
    """(shape) of dtype, read-only. Raises MalformedMessage."""
    try:
        if not _DTYPES.fullmatch(packed[_DTYPE]):  # numpy parses whatever else a text may say
            raise ValueError(f"an array of {packed[_DTYPE]!r:.50}")
        dtype = np.dtype(packed[_DTYPE])
        return np.frombuffer(packed["bytes"], dtype).reshape(packed["shape"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"an entry with an array that cannot be read: {error}") from None
