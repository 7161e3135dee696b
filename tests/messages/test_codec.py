"""The wire form: pinned bytes, bounds, and that nothing but MessageError ever comes out of `decode`."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from support.specimens.golden import GOLDEN
from support.specimens.messages import ID, job, result, specimens

from rolloutmq.messages import (
    GenerateJob,
    InvalidField,
    MalformedMessage,
    MessageError,
    Partial,
    RolloutResult,
    SamplingParams,
    Segment,
    UnsupportedVersion,
    WeightAnnouncement,
    WeightManifest,
    decode,
    encode,
)
from rolloutmq.messages.codec import KINDS, MAJOR, MAX_BIN, MAX_ELEMENTS, MAX_ITEMS, MAX_KEYS, MAX_STR, MINOR
from rolloutmq.messages.model.base import MAX_TOKENS


def frame(kind: int, fields: Any, *, major: int = MAJOR, minor: int = MINOR) -> bytes:
    return bytes((major, minor, kind)) + msgpack.packb(fields)


# --- what is pinned ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_every_kind_are_pinned(name: str) -> None:
    message = specimens()[name]
    assert encode(message).hex() == GOLDEN[name]
    assert decode(bytes.fromhex(GOLDEN[name]), type(message)) == message


def test_every_field_has_golden_bytes() -> None:
    pinned: dict[type, set[str]] = {}
    for message in specimens().values():
        pinned.setdefault(type(message), set()).update(message.model_fields_set)
    assert pinned == {kind: set(kind.model_fields) for kind in KINDS.values()}
    assert GOLDEN.keys() == specimens().keys()


def test_every_kind_has_golden_bytes() -> None:
    assert {type(message) for message in specimens().values()} == set(KINDS.values())
    assert {kind: cls.__name__ for kind, cls in KINDS.items()} == {
        1: "GenerateJob",
        2: "RolloutResult",
        3: "Partial",
        4: "WeightManifest",
        5: "WeightAnnouncement",
        6: "WorkerStatus",
        20: "Command",
        21: "CommandReply",
        32: "EmbedJob",
        33: "EmbedResult",
        34: "RewardJob",
        35: "RewardResult",
        36: "ScoreJob",
        37: "ScoreResult",
    }


def test_arrays_come_back_as_what_they_were() -> None:
    sent = result(job(), token_ids=np.arange(5), segments=(Segment(1, 5),), logprobs=np.linspace(-1, 0, 5))
    back = decode(encode(sent), RolloutResult)
    assert back.token_ids.dtype == np.int32
    assert back.logprobs.dtype == np.float32
    assert back.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert back.segments == (Segment(1, 5),)
    with pytest.raises(ValueError, match="read-only"):
        back.token_ids[0] = 9


def test_an_empty_sample_travels() -> None:
    back = decode(encode(result(job(), token_ids=[], logprobs=[], segments=())), RolloutResult)
    assert back.token_ids.size == 0
    assert back.logprobs.size == 0
    assert back.oldest_version is None


def test_a_message_does_not_change_with_the_array_it_was_made_of() -> None:
    prompt = np.array([1, 2, 3])
    made = job(token_ids=prompt)
    prompt[0] = 9
    assert made.token_ids.tolist() == [1, 2, 3]


def test_logprobs_that_are_not_finite_travel_unchanged() -> None:
    """Policy: the codec carries NaN and infinities bit for bit; whether to train on them is the trainer's decision."""
    sent = result(job(), logprobs=[math.nan, -math.inf])
    back = decode(encode(sent), RolloutResult)
    assert np.isnan(back.logprobs[0])
    assert back.logprobs[1] == -np.inf
    assert back == sent


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_newer_minor_decodes_without_its_new_fields() -> None:
    fields = {"token_ids": b"\x01\0\0\0", "id": ID, "temperature_schedule": [1, 2]}
    assert decode(frame(1, fields, minor=MINOR + 1), GenerateJob).id == ID
    with pytest.raises(InvalidField, match="temperature_schedule"):
        decode(frame(1, fields), GenerateJob)


def test_an_older_minor_decodes_as_it_is() -> None:
    for name, message in specimens().items():
        assert decode(bytes((MAJOR, 0)) + bytes.fromhex(GOLDEN[name])[2:], type(message)) == message


def test_another_major_is_refused() -> None:
    for major in (MAJOR + 1, 0, 255):
        with pytest.raises(UnsupportedVersion, match=rf"version {major}\.{MINOR}.*upgrade"):
            decode(frame(1, {}, major=major), GenerateJob)


def test_another_kind_is_refused_by_name() -> None:
    with pytest.raises(MalformedMessage, match="a Partial, not a GenerateJob"):
        decode(encode(specimens()["partial"]), GenerateJob)
    with pytest.raises(MalformedMessage, match="kind 200"):
        decode(frame(200, {}), GenerateJob)


# --- wrong fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": bytes(4 * MAX_TOKENS + 4)}, "token_ids"),
        ({"token_ids": b"\x01\0\0"}, "token_ids"),
        ({"token_ids": b""}, "GenerateJob"),
        ({"token_ids": b"\xff\xff\xff\xff"}, "token_ids"),
        ({"token_ids": b"\x01\0\0\0", "text": "both"}, "GenerateJob"),
        ({}, "GenerateJob"),
        ({"text": ""}, "GenerateJob"),
        ({"text": 5}, "text"),
        ({"text": "x", "n": 0}, "n"),
        ({"text": "x", "n": 4097}, "n"),
        ({"text": "x", "n": True and "3x"}, "n"),
        ({"text": "x", "id": "../../etc/passwd"}, "id"),
        ({"text": "x", "id": ID.upper()}, "id"),
        ({"text": "x", "id": ID + "\n"}, "id"),
        ({"text": "x", "sampling": {"max_new_tokens": 0}}, "sampling.max_new_tokens"),
        ({"text": "x", "sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"text": "x", "sampling": {"top_p": math.nan}}, "sampling.top_p"),
        ({"text": "x", "sampling": {"top_k": 0}}, "sampling.top_k"),
        ({"text": "x", "sampling": {"stop_token_ids": [1] * 65}}, "sampling.stop_token_ids"),
        ({"text": "x", "sampling": {"stop_token_ids": [-1]}}, "sampling.stop_token_ids.0"),
        ({"text": "x", "deadline_s": math.inf}, "deadline_s"),
        ({"text": "x", "priority": "urgent"}, "priority"),
        ({"text": "x", "metadata": {"k": [1]}}, "metadata.k"),
        ({"text": "x", "metadata": {str(i): i for i in range(65)}}, "metadata"),
        ({"text": "x", "reply_to": "c" * 129}, "reply_to"),
        ({"text": "x", "logit_processors": [{"name": "os.system('x')"}]}, "logit_processors.0.name"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ],
)
def test_a_wrong_field_is_named_with_value_and_what_is_allowed(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        decode(frame(1, {"id": ID} | fields), GenerateJob)
    error = caught.value
    assert error.field.startswith(field)
    assert error.allowed
    assert str(error).startswith(f"{error.field}=")
    assert len(str(error)) < 600
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        {"segments": (Segment(0, 3),)},
        {"segments": (Segment(2, 1), Segment(1, 1))},
        {"segments": ((0, 2, 3),)},
        {"segments": ((0, 0), (0, 2))},
        {"logprobs": [-1.0]},
        {"finish_reason": "aborted"},
        {"sample": -1},
        {"attempt": 0},
    ],
)
def test_a_result_that_does_not_add_up_is_refused(wrong: dict[str, Any]) -> None:
    fields = decode(encode(result(job())), RolloutResult).model_dump(exclude_unset=True) | wrong
    with pytest.raises(InvalidField):
        decode(frame(2, fields), RolloutResult)


@pytest.mark.parametrize(
    "wrong", [{"segments": [[0, 1]]}, {"segments": [[2, 1], [1, 1]]}, {"logprobs": b"\0\0\0\0"}, {"logprobs": None}]
)
def test_a_partial_that_does_not_add_up_is_refused(wrong: dict[str, Any]) -> None:
    whole = {"token_ids": b"\1\0\0\0\2\0\0\0", "logprobs": bytes(8), "segments": [[0, 2]]}
    assert decode(frame(3, whole), Partial).token_ids.tolist() == [1, 2]
    with pytest.raises(InvalidField):
        decode(frame(3, whole | wrong), Partial)


def test_construction_names_the_field_too() -> None:
    with pytest.raises(InvalidField, match=r"^n=0: .*greater than or equal to 1"):
        GenerateJob.build(token_ids=[1], n=0)
    with pytest.raises(InvalidField, match=r"^token_ids=\[-1\].*not negative, got -1"):
        GenerateJob.build(token_ids=[-1])
    with pytest.raises(InvalidField, match=r"token_ids.*fit 32 bits, got 4294967296"):
        GenerateJob.build(token_ids=[1 << 32])
    with pytest.raises(InvalidField, match=r"token_ids.*integers, got float64"):
        GenerateJob.build(token_ids=[1.5])
    with pytest.raises(InvalidField, match="one-dimensional"):
        GenerateJob.build(token_ids=[[1]])


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": 1 << 70}},
        {"min_version": 1 << 70},
        {"sampling": SamplingParams(stop_token_ids=(1 << 70,))},
        {"seed": 1 << 70},
        {"logit_processors": ({"name": "x", "params": {"a": object()}},)},
        {"logit_processors": ({"name": "x", "params": {"a": 1 << 70}},)},
        {"logit_processors": ({"name": "x", "params": {"a": {1: 2}}},)},
    ],
)
def test_what_cannot_travel_is_refused_under_its_name(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        encode(GenerateJob.build(token_ids=[1], **fields))
    assert refused.value.field.startswith(next(iter(fields)))


def test_a_message_no_decoder_would_accept_is_not_encoded() -> None:
    with pytest.raises(InvalidField, match="at most"):
        encode(job(metadata={str(i): "x" * (3 << 20) for i in range(23)}))


TOO_LARGE: dict[str, dict[str, Any]] = {
    "text": {"text": "\u00e9" * (MAX_STR // 2 + 1)},
    "messages": {"messages": [{"role": "user", "content": "\u00e9" * (MAX_STR // 2 + 1)}]},
    "metadata": {"metadata": {"a": "x" * (MAX_STR + 1)}},
    "tools": {"tools": [{"function": {"name": "f", "parameters": {"a": bytes(MAX_BIN + 1)}}}]},
    "logit_processors": {"logit_processors": [{"name": "p", "params": {"a": [None] * (MAX_ITEMS + 1)}}]},
}


@pytest.mark.parametrize("field", TOO_LARGE)
def test_what_a_decoder_refuses_is_refused_by_the_sender_under_its_name(field: str) -> None:
    prompt = {} if field in ("text", "messages") else {"token_ids": [1]}
    with pytest.raises(InvalidField, match=f"at most {MAX_STR} bytes of UTF-8") as refused:
        encode(GenerateJob.build(**prompt, **TOO_LARGE[field]))
    assert refused.value.field == field


def test_so_many_keys_and_elements_and_no_more_are_sent() -> None:
    def sent(params: dict[str, Any]) -> GenerateJob:
        return decode(encode(job(logit_processors=[{"name": "p", "params": params}])), GenerateJob)

    keys = {str(i): None for i in range(MAX_KEYS)}
    assert sent({"a": keys}).logit_processors[0].params == {"a": keys}
    with pytest.raises(InvalidField, match=f"{MAX_KEYS} in a map"):
        sent({"a": keys | {"more": None}})
    with pytest.raises(InvalidField, match=f"{MAX_ELEMENTS} in all"):
        sent({"a": [[None] * MAX_ITEMS for _ in range(MAX_ELEMENTS // MAX_ITEMS)]})


def test_a_text_that_a_client_could_not_read_fails_at_the_worker() -> None:
    with pytest.raises(InvalidField, match=f"at most {MAX_STR} bytes"):
        encode(result(job(), text="\u00e9" * (MAX_STR // 2 + 1)))


def test_nothing_is_imported_or_unpickled() -> None:
    class Boom:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("unpickled",))

    for field in ("text", "metadata", "logit_processors", "token_ids"):
        with pytest.raises(MessageError):
            decode(frame(1, {"id": ID, field: pickle.dumps(Boom()) + b"x"}), GenerateJob)


def test_a_manifest_says_its_bytes() -> None:
    manifest = specimens()["manifest"]
    assert isinstance(manifest, WeightManifest)
    assert manifest.nbytes == 12


@pytest.mark.parametrize(
    "field", [("backend", "gloo"), ("catch_up", True), ("roster", {"w": 1}), ("world_size", 2), ("group", "g")]
)
def test_an_announcement_of_an_older_trainer_is_refused_by_its_field(field: tuple[str, Any]) -> None:
    fields = specimens()["adapter-announcement"].model_dump(exclude_unset=True)
    with pytest.raises(InvalidField, match=f"^{field[0]}="):
        decode(frame(5, fields | dict([field])), WeightAnnouncement)
