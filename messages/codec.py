"""The wire form: three header bytes, then one msgpack map.

    byte 0   major version: another major is refused
    byte 1   minor version: a newer minor decodes; fields unknown here are dropped
    byte 2   kind of message
    bytes 3… msgpack map, str keys; arrays of tokens and logprobs as packed little-endian bin;
             a field that nobody set is left out, so a changed default needs a new major version

Decoding trusts no length, creates nothing but plain data, and raises only subclasses of MessageError. Whatever is in a
frame, it costs time and memory in proportion to its size:

    keys        text, or the token ids of a logit bias. Arrays become lists, which have no hash, so no sender can choose
                keys that collide.
    containers  each has a largest size, and all of them together hold at most MAX_ELEMENTS.
    depth       msgpack stops at 1,024 levels; a field of free data (`model.base.PlainObject`) at MAX_DEPTH.
    errors      validation of an array ends at its first wrong element (`model.base.Items`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgpack
from pydantic import ValidationError

from .errors import InvalidField, MalformedMessage, UnsupportedVersion
from .model import (
    MAX_ARRAY_BYTES,
    MAX_TEXT,
    Command,
    CommandReply,
    EmbedJob,
    EmbedResult,
    GenerateJob,
    Message,
    Partial,
    RewardJob,
    RewardResult,
    RolloutResult,
    ScoreJob,
    ScoreResult,
    TaskJob,
    TaskResult,
    WeightAnnouncement,
    WeightManifest,
    WorkerStatus,
    as_invalid_field,
)

Job = GenerateJob | TaskJob
Result = RolloutResult | TaskResult

JOBS: tuple[type[GenerateJob] | type[TaskJob], ...] = (GenerateJob, EmbedJob, RewardJob, ScoreJob)
RESULTS: tuple[type[RolloutResult] | type[TaskResult], ...] = (RolloutResult, EmbedResult, RewardResult, ScoreResult)

MAJOR = 1
MINOR = 1
HEADER = 3
MAX_MESSAGE_BYTES = 64 << 20
MAX_STR = MAX_TEXT
MAX_BIN = MAX_ARRAY_BYTES
MAX_ITEMS = 1 << 17
MAX_KEYS = 1 << 14
MAX_ELEMENTS = 1 << 21
"""Elements of all arrays and maps together, where each array and map counts as one more."""
_CHECKED_BYTES = 2 * MAX_KEYS
"""A shorter body is within all of these limits: an element takes at least one byte, and an item of a map two."""
_TEXT = frozenset({str})
_TOKEN_IDS = frozenset({int})

KINDS: dict[int, type[Message]] = {
    cls.KIND: cls
    for cls in (*JOBS, *RESULTS, Partial, WeightManifest, WeightAnnouncement, WorkerStatus, Command, CommandReply)
}
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """The message as a frame. Raises InvalidField if it is larger than a decoder accepts or is no plain data."""
    try:
        body: bytes = msgpack.packb(message.model_dump(exclude_unset=True, exclude_none=True), use_bin_type=True)
    except (OverflowError, TypeError, ValueError):
        raise _unsendable(message, "plain data, integers of 64 bits") from None
    if len(body) + HEADER > MAX_MESSAGE_BYTES:
        raise InvalidField(type(message).__name__, f"{len(body)} bytes", f"at most {MAX_MESSAGE_BYTES} bytes encoded")
    if len(body) > _CHECKED_BYTES:
        try:
            _unpack(body, type(message))
        except MalformedMessage:
            raise _unsendable(message, _LIMITS) from None
    return bytes((MAJOR, MINOR, message.KIND)) + body


_LIMITS = (
    f"at most {MAX_STR} bytes of UTF-8 in a text, {MAX_BIN} in bytes, {MAX_ITEMS} elements in an array, "
    f"{MAX_KEYS} in a map, and {MAX_ELEMENTS} in all together"
)


def _unsendable(message: Message, allowed: str) -> InvalidField:
    """The error for the first field that a decoder would refuse, or msgpack. allowed: what it says is."""
    for name, value in message.model_dump(exclude_unset=True, exclude_none=True).items():
        try:
            _unpack(msgpack.packb({name: value}), type(message))
        except (OverflowError, TypeError, ValueError, MalformedMessage):
            return InvalidField(name, value, allowed)
    return InvalidField(type(message).__name__, "a message", allowed)


def decode(data: bytes, expect: type[M]) -> M:
    """The message in a frame.

    Raises MalformedMessage, UnsupportedVersion, or InvalidField if `data` is not a well-formed `expect`.
    """
    if len(data) <= HEADER:
        raise MalformedMessage(f"{len(data)} bytes are too short for a {expect.__name__}")
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"{len(data)} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
    major, minor, kind = data[0], data[1], data[2]
    if major != MAJOR:
        raise UnsupportedVersion(f"message version {major}.{minor}; this side speaks {MAJOR}.x: upgrade the older side")
    if kind != expect.KIND:
        known = KINDS.get(kind)
        raise MalformedMessage(f"a {known.__name__ if known else f'message of kind {kind}'}, not a {expect.__name__}")
    fields = _unpack(data[HEADER:], expect)
    if minor > MINOR:
        fields = {name: value for name, value in fields.items() if name in expect.model_fields}
    try:
        return expect.model_validate(fields)
    except ValidationError as error:
        raise as_invalid_field(error) from None
    except RecursionError:
        raise MalformedMessage(f"a {expect.__name__} that is nested too deep") from None


def decode_one_of(data: bytes, expected: Sequence[type[M]]) -> M:
    """The message in a frame that may hold any of `expected`; raises what `decode` raises."""
    found = next((kind for kind in expected if len(data) > HEADER and data[2] == kind.KIND), expected[0])
    return decode(data, found)


def _unpack(body: bytes, expect: type[Message]) -> dict[str, Any]:
    room = MAX_ELEMENTS
    has_ids = expect is GenerateJob and b"logit_bias" in body  # the one map whose keys are token ids

    def look(items: Any) -> Any:
        nonlocal room
        room -= 1 + len(items)
        if room < 0:  # an empty map is one byte in the frame and 64 in memory
            raise ValueError(f"more than {MAX_ELEMENTS} elements")
        if type(items) is dict and not (_TEXT.issuperset(kinds := {*map(type, items)}) or kinds == _TOKEN_IDS):
            raise ValueError("a key that is not text")
        return items

    long = len(body) > MAX_ELEMENTS  # an element takes at least one byte
    try:
        fields = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,  # a tuple would be a key whose hash the sender can choose
            list_hook=look if long else None,
            object_hook=look if long or has_ids else None,
            strict_map_key=not has_ids,
            max_str_len=MAX_STR,
            max_bin_len=MAX_BIN,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_KEYS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        # ValueError covers ExtraData, FormatError, StackError and every length limit; TypeError an unhashable key.
        raise MalformedMessage(f"{expect.__name__} is not valid msgpack: {error or type(error).__name__}") from None
    if not isinstance(fields, dict) or not _TEXT.issuperset(map(type, fields)):
        raise MalformedMessage(f"{expect.__name__} is not a map of named fields")
    return fields
