"""Bytes that nobody honest sends: nothing but MessageError ever comes out of `decode`."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.specimens.messages import ID, specimens

from rolloutmq.messages import (
    GenerateJob,
    InvalidField,
    MalformedMessage,
    MessageError,
    Partial,
    SamplingParams,
    decode,
    encode,
)
from rolloutmq.messages.codec import KINDS, MAJOR, MAX_MESSAGE_BYTES, MINOR
from rolloutmq.messages.model.base import MAX_TOKENS, Message

FRAMES = {name: encode(message) for name, message in specimens().items()}


def frame(kind: int, fields: Any) -> bytes:
    return bytes((MAJOR, MINOR, kind)) + msgpack.packb(fields)


@pytest.mark.parametrize("name", FRAMES)
def test_truncated_anywhere_is_malformed(name: str) -> None:
    data, kind = FRAMES[name], type(specimens()[name])
    for length in range(len(data)):
        with pytest.raises(MalformedMessage):
            decode(data[:length], kind)
    with pytest.raises(MalformedMessage):
        decode(data + b"\0", kind)


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa1n" + b"\x91" * 100_000 + b"\xc0",  # nested far deeper than any stack
        b"\x81\xa1n" + b"\x81\xa1n" * 100_000 + b"\xc0",
        b"\x81\xa1n\xdd\xff\xff\xff\xff",  # an array of 4 Gi elements
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\x81\xa1n\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\x81\xa1n\xdb\xff\xff\xff\xff",  # 4 GiB of text
        b"\x81\xa1n\xdd\x00\x03\x00\x00" + b"\xc0" * (3 << 16),  # more elements than allowed, all there
        b"\x81\xa1n\xc7\xff\x05" + b"x" * 255,  # an extension type
        b"\x81\xa1n\xd4\x05x",
        b"\x81\xa1n\xd6\xff\0\0\0\0",  # a timestamp
        b"\x81\x80\xc0",  # a map as key
        b"\x81\xc4\x01n\x01",  # bytes as key
        b"\x81\x01\x01",  # a number as key
        b"\x81\xa2\xff\xfe\x01",  # a key that is not UTF-8
        b"\x93\x01\x02\x03",
        b"\xc0",
        b"\xc1",
    ],
)
def test_a_bomb_is_malformed(body: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(bytes((MAJOR, MINOR, 1)) + body, GenerateJob)


@pytest.mark.parametrize("depth", [50, 300, 600, 1000])
@pytest.mark.parametrize(("kind", "field"), [(1, "n"), (1, "token_ids"), (1, "metadata"), (2, "logprobs")])
def test_nesting_that_msgpack_allows_is_an_error_about_the_field(kind: int, field: str, depth: int) -> None:
    body = b"\x81" + msgpack.packb(field) + b"\x91" * depth + b"\xc0"
    with pytest.raises(InvalidField):
        decode(bytes((MAJOR, MINOR, kind)) + body, KINDS[kind])


@pytest.mark.parametrize("value", [[{}], [[1.0], [2.0]], ["x"], [b"x"], [[]], 5, "abc", [1, [2]]])
def test_an_array_of_something_else_is_an_error_about_the_field(value: Any) -> None:
    fields = {"token_ids": b"", "logprobs": value, "segments": []}
    with pytest.raises(InvalidField):
        decode(frame(3, fields), Partial)
    with pytest.raises(InvalidField):
        decode(frame(1, {"id": ID, "token_ids": value, "text": "x"}), GenerateJob)


def test_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedMessage, match="at most"):
        decode(bytes(MAX_MESSAGE_BYTES + 1), GenerateJob)


# --- generated --------------------------------------------------------------------------------------------------------

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def only_message_errors(data: bytes, kind: type[Message]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(MessageError):
            assert type(decode(data, kind)) is kind


@QUICK
@given(kind=st.sampled_from(sorted(KINDS)), body=st.binary(max_size=200))
def test_random_bytes_only_raise_message_errors(kind: int, body: bytes) -> None:
    only_message_errors(bytes((MAJOR, MINOR, kind)) + body, KINDS[kind])
    only_message_errors(body, KINDS[kind])


@QUICK
@given(name=st.sampled_from(sorted(FRAMES)), data=st.data())
def test_mutated_frames_only_raise_message_errors(name: str, data: st.DataObject) -> None:
    frame_bytes = bytearray(FRAMES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame_bytes) - 1))
        frame_bytes[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not frame_bytes:
            return
    only_message_errors(bytes(frame_bytes), type(specimens()[name]))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=4),
    max_leaves=8,
)


@QUICK
@given(name=st.sampled_from(sorted(FRAMES)), data=st.data())
def test_any_plain_value_in_any_field_only_raises_message_errors(name: str, data: st.DataObject) -> None:
    message = specimens()[name]
    fields = message.model_dump(exclude_unset=True)
    fields[data.draw(st.sampled_from(sorted(type(message).model_fields)))] = data.draw(PLAIN)
    only_message_errors(frame(message.KIND, fields), type(message))


JOBS = st.builds(
    GenerateJob,
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    reply_to=st.text(max_size=20),
    n=st.integers(1, 4096),
    priority=st.sampled_from(["high", "normal", "low"]),
    deadline_s=st.none() | st.floats(1e-3, 1e6),
    max_staleness=st.none() | st.integers(0, 9),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    metadata=st.dictionaries(
        st.text(max_size=5),
        st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text(),
        max_size=4,
    ),
    sampling=st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, MAX_TOKENS),
        temperature=st.floats(0, 100),
        logit_bias=st.dictionaries(st.integers(0, 1000), st.floats(-9, 9), max_size=3),
    ),
)


@QUICK
@given(sent=JOBS)
def test_any_valid_job_comes_back_equal(sent: GenerateJob) -> None:
    back = decode(encode(sent), GenerateJob)
    assert back == sent
    assert hash(back) == hash(sent)
    assert encode(back) == encode(sent)


def test_a_bomb_of_empty_maps_ends_before_it_is_built() -> None:
    """An empty map is one byte on the wire and 64 in memory: a frame of 64 MB would take gigabytes."""
    lists = [[{}] * 100_000] * 3
    with pytest.raises(MalformedMessage, match=r"more than \d+ maps"):
        decode(frame(GenerateJob.KIND, {"id": ID, "token_ids": lists}), GenerateJob)
