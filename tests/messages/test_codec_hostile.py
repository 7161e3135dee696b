"""Bytes that nobody honest sends: nothing but MessageError ever comes out of `decode`."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from typing import Any

import msgpack
import numpy as np
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
from rolloutmq.messages.model.base import MAX_DEPTH, MAX_TOKENS, Message

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


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("where", ["", "sampling", "metadata", "params", "logit_bias"])
@pytest.mark.parametrize(
    "key", [b"\x91\x01", b"\x90", b"\x92\x01\x91\x02", b"\x80", b"\x81\xa1a\x01", b"\x01", b"\xc0", b"\xc3"]
)
def test_a_key_that_is_not_text_is_refused_before_it_is_hashed(
    kind: int, where: str, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever writes arrays as keys chooses their hashes: 336 KB of colliding ones took the decoder 19 seconds."""
    unpack, options = msgpack.unpackb, []
    monkeypatch.setattr(msgpack, "unpackb", lambda body, **given: options.append(given) or unpack(body, **given))
    inner = b"\x81" + key + b"\x01"
    body = b"\x81" + msgpack.packb(where) + inner if where else inner
    with pytest.raises(MessageError):
        decode(bytes((MAJOR, MINOR, kind)) + body, KINDS[kind])
    assert options[0]["use_list"] is True  # a list has no hash, so msgpack itself refuses it as a key


def test_token_ids_are_keys_of_a_logit_bias_only() -> None:
    sampling = {"logit_bias": {7: 1.0}}
    assert decode(frame(1, {"id": ID, "text": "x", "sampling": sampling}), GenerateJob).sampling.logit_bias == {7: 1.0}
    with pytest.raises(MessageError):
        decode(frame(1, {"id": ID, "text": "x", "sampling": sampling, "metadata": {7: 1}}), GenerateJob)
    with pytest.raises(MessageError):
        decode(frame(1, {"id": ID, "text": "x", "sampling": {"logit_bias": {7: 1.0, "8": 1.0}}}), GenerateJob)


@pytest.mark.parametrize("opens", [b"\x91", b"\x81\xa1a"])
@pytest.mark.parametrize("depth", [MAX_DEPTH, 500, 1000])
@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (1, {"id": ID, "text": "x", "logit_processors": [{"name": "p", "params": {"a": 0}}]}),
        (1, {"id": ID, "text": "x", "tools": [{"function": {"name": "f", "parameters": {"a": 0}}}]}),
        (2, {"tool_calls": [{"id": "c", "name": "f", "arguments": {"a": 0}}]}),
        (20, {"id": ID, "action": "a", "timeout_s": 1.0, "params": {"a": 0}}),
        (21, {"id": ID, "worker_id": "w", "ok": True, "result": {"a": 0}}),
    ],
)
def test_free_data_is_nested_so_deep_and_no_deeper(kind: int, start: Any, depth: int, opens: bytes) -> None:
    if kind == 2:
        start = specimens()["tool-result"].model_dump(exclude_unset=True) | start
    body = frame(kind, start)
    assert decode(body, KINDS[kind])
    with pytest.raises(InvalidField, match=f"nested deeper than {MAX_DEPTH}"):
        decode(body.replace(b"\xa1a\x00", b"\xa1a" + opens * depth + b"\x00"), KINDS[kind])
    decode(body.replace(b"\xa1a\x00", b"\xa1a" + opens * (MAX_DEPTH - 1) + b"\x00"), KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (4, {"version": 1, "bucket_nbytes": [], "tensors": [{}] * 100_000}),
        (4, {"version": 1, "bucket_nbytes": ["x"] * 100_000, "tensors": []}),
        (2, {"segments": [[]] * 100_000}),
        (2, {"metadata": {str(i): [] for i in range(10_000)}}),
        (1, {"id": ID, "sampling": {"stop_token_ids": ["x"] * 100_000}}),
        (1, {"id": ID, "messages": [{}] * 100_000}),
        (6, {"features": [1] * 100_000}),
        (32, {"id": ID, "token_ids": [b"abc"] * 100_000}),
        (32, {"id": ID, "conversations": [[]] * 100_000}),
    ],
)
def test_an_array_ends_at_its_first_wrong_element(kind: int, fields: Any) -> None:
    """An error costs more than the element does: 128 KB of empty maps took ten seconds."""
    with pytest.raises(InvalidField) as refused:
        decode(frame(kind, fields), KINDS[kind])
    more = re.search(r"\(and (\d+) more\)", str(refused.value))
    assert more is None or int(more[1]) < 64


@pytest.mark.parametrize("name", FRAMES)
def test_a_boolean_is_no_integer(name: str) -> None:
    message = specimens()[name]
    fields = message.model_dump(exclude_unset=True)
    for field, value in fields.items():
        if type(value) is int:
            with pytest.raises(InvalidField) as refused:
                decode(frame(message.KIND, fields | {field: True}), type(message))
            assert refused.value.field.startswith(field)


def test_numpys_integers_are_integers() -> None:
    made = GenerateJob.build(text="x", n=np.int64(3), sampling={"stop_token_ids": [np.int32(5)]}, seed=np.uint8(1))
    assert (made.n, made.sampling.stop_token_ids, made.seed) == (3, (5,), 1)
    for value in (True, np.True_, "3"):
        with pytest.raises(InvalidField, match="an integer, not"):
            GenerateJob.build(text="x", n=value)  # type: ignore[arg-type]


def test_ranges_of_stop_expressions_are_bounded() -> None:
    """Python's compiler looks at every character of a range: 8 KB of expressions took half a minute."""
    SamplingParams(stop_regex=("(?i)[\0-\U0010ffff]x",))
    with pytest.raises(InvalidField, match=r"stop_regex.*ranges of more than"):
        GenerateJob.build(text="x", sampling={"stop_regex": ["(?i)a(b|[\0-\U0010ffff])", "[\0-\U0010ffff]"]})


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("field", ["join_timeout_s", "transfer_timeout_s"])
def test_a_timeout_is_a_number(field: str, value: float) -> None:
    fields = specimens()["announcement"].model_dump(exclude_unset=True)
    with pytest.raises(InvalidField, match=field):
        decode(frame(5, fields | {field: value}), KINDS[5])


def test_an_error_shows_a_value_of_any_size() -> None:
    deep: Any = 0
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, 10**5000, "x" * 10_000, [0] * 10_000, bytes(10_000), {str(i): i for i in range(10_000)}):
        assert len(str(InvalidField("f", value, "less"))) < 150


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
    lists = [[{}] * 100_000] * 30
    with pytest.raises(MalformedMessage, match=r"more than \d+ elements"):
        decode(frame(GenerateJob.KIND, {"id": ID, "token_ids": lists}), GenerateJob)
