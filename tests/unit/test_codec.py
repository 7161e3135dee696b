"""The wire form: pinned bytes, bounds, and that nothing but MessageError ever comes out of `decode`."""

from __future__ import annotations

import math
import pickle
from typing import Any

import msgpack
import numpy as np
import pytest
from specimens import ID, job, result, specimens

from rolloutmq.messages import (
    GenerateJob,
    InvalidField,
    LogitProcessor,
    MalformedMessage,
    MessageError,
    Partial,
    RolloutResult,
    SamplingParams,
    Segment,
    UnsupportedVersion,
    WeightManifest,
    decode,
    encode,
)
from rolloutmq.messages.base import MAX_TOKENS
from rolloutmq.messages.codec import KINDS, MAJOR, MINOR

GOLDEN = {
    "job": (
        "0100018ea26964d9203031393266306331613262333763346438653566363037313832393361346235a87265706c795f746f"
        "a8636c69656e742d31a9746f6b656e5f696473c40c0100000002000000e0930400a16e04a873616d706c696e6784ae6d6178"
        "5f6e65775f746f6b656e7310ab74656d7065726174757265cb3fe0000000000000ae73746f705f746f6b656e5f6964739107"
        "aa6c6f6769745f626961738105cbbff8000000000000a867726f75705f6964a26731a87072696f72697479a468696768aa64"
        "6561646c696e655f73cb404e000000000000ab6d696e5f76657273696f6e02ad6d61785f7374616c656e65737301a86c6f67"
        "70726f627381a773616d706c6564c2a4736565642aa874726163655f6964a174a86d6574616461746185a16101a162c0a163"
        "c3a164cb3fe0000000000000a165a178"
    ),
    "chat": (
        "01000183a26964d9203031393266306331613262333763346438653566363037313832393361346235a87265706c795f746f"
        "a163a86d657373616765739182a4726f6c65a475736572a7636f6e74656e74a368c3a9"
    ),
    "result": (
        "010002de0011a66a6f625f6964d9203031393266306331613262333763346438653566363037313832393361346235a67361"
        "6d706c6501a16e04a867726f75705f6964a26731a9746f6b656e5f696473c40c050000000600000007000000a86c6f677072"
        "6f6273c40c000000bf000080be000080bfad66696e6973685f726561736f6ea473746f70ac6d6174636865645f73746f7007"
        "a87365676d656e747392920201920302a9776f726b65725f6964a177a7617474656d707402aa70726f6d70745f696473c404"
        "01000000a474657874a3616263a774696d696e677383a6717565756564cb3fe0000000000000aa67656e65726174696e67cb"
        "3ff0000000000000a777616974696e67cb3fd0000000000000ab66696e6765727072696e7481a6656e67696e65a3652d31a8"
        "6d6574616461746181a16b01a874726163655f6964a174"
    ),
    "partial": ("01000383a9746f6b656e5f696473c40405000000a86c6f6770726f6273c404000000bfa87365676d656e747391920201"),
    "manifest": (
        "01000483a776657273696f6e03ad6275636b65745f6e62797465739140a774656e736f72739187a46e616d65a161a5647479"
        "7065a862666c6f61743136a57368617065920203a66275636b657400a66f666673657400a66e62797465730ca66469676573"
        "74b030306666303066663030666630306666"
    ),
    "announcement": (
        "0100058ea776657273696f6e03a565706f636801a46d6f6465a5647261696ea76261636b656e64a4676c6f6fa96e6f6e6669"
        "6e697465a5616c6c6f77a6766572696679c2a4686f7374a831302e302e302e31a4706f7274cd733ca863617463685f7570c3"
        "ae6a6f696e5f74696d656f75745f73cb4024000000000000b27472616e736665725f74696d656f75745f73cb404e00000000"
        "0000a6726f7374657281a17701aa776f726c645f73697a6502a567726f7570a767726f75702d31"
    ),
    "adapter-job": (
        "01000187a26964d9203031393266306331613262333763346438653566363037313832393361346235a474657874a368c3a9"
        "aa73657373696f6e5f6964a173a46c6f7261a46d617468b36d696e5f616461707465725f76657273696f6e02ad6869646465"
        "6e5f737461746573a46c617374b06c6f6769745f70726f636573736f72739182a46e616d65a170a6706172616d7381a17801"
    ),
    "wide-job": (
        "01000187a26964d9203031393266306331613262333763346438653566363037313832393361346235a87265706c795f746f"
        "a163a9746f6b656e5f696473c40401000000a873616d706c696e6786ae6d696e5f6e65775f746f6b656e7302a473746f7092"
        "a43c2f613ea20a0aaa73746f705f726567657891a85b302d395d7b337db473746f705f746f6b656e5f73657175656e636573"
        "929201029103ac696e636c7564655f73746f70c2ab6a736f6e5f736368656d61a27b7da86c6f6770726f627384a3746f7002"
        "a670726f6d7074c3a9746f6b656e5f696473920708a46b696e64a67363616c6564a673747265616dc3ae726f757465645f65"
        "787065727473c3"
    ),
    "wide-result": (
        "0100028ea66a6f625f6964d9203031393266306331613262333763346438653566363037313832393361346235a673616d70"
        "6c6500a16e01a867726f75705f6964a26731a9746f6b656e5f696473c4080500000006000000a86c6f6770726f6273c40800"
        "0000bf000080bfad66696e6973685f726561736f6ea473746f70ac6d6174636865645f73746f70a43c2f613ea87365676d65"
        "6e747391920302a9776f726b65725f6964a177a7617474656d707401ac6c6f6770726f625f6b696e64a67363616c6564ac74"
        "6f6b656e5f61727261797381a7746f705f69647393a5696e743332920202c41005000000090000000600000002000000a661"
        "727261797381af70726f6d70745f6c6f6770726f627393a7666c6f617433329102c4080000c07f0000c0bf"
    ),
    "wide-partial": (
        "01000385a9746f6b656e5f696473c40405000000a86c6f6770726f6273c404000000bfa87365676d656e747391920301ac74"
        "6f6b656e5f61727261797381ab69645f6c6f6770726f627393a7666c6f61743332920102c408000000c0000040c0a6617272"
        "61797381b16c6173745f68696464656e5f737461746593a675696e7431369103c40601000200ffff"
    ),
    "adapter-result": (
        "0100028ca66a6f625f6964d9203031393266306331613262333763346438653566363037313832393361346235a673616d70"
        "6c6500a16e01a867726f75705f6964a26731a9746f6b656e5f696473c40c050000000600000007000000ad66696e6973685f"
        "726561736f6ea66c656e677468a87365676d656e747391920303a761646170746572a46d617468af616461707465725f7665"
        "7273696f6e04b0616461707465725f7365676d656e747392920201920402a9776f726b65725f6964a177a7617474656d7074"
        "01"
    ),
    "adapter-partial": (
        "01000385a5737461727403a9746f6b656e5f696473c40405000000a86c6f6770726f6273c404000000bfa87365676d656e74"
        "7391920301b0616461707465725f7365676d656e747391920201"
    ),
    "adapter-announcement": (
        "01000587a776657273696f6e04a565706f636802a4686f7374a831302e302e302e31a4706f7274cd733cae6a6f696e5f7469"
        "6d656f75745f73cb4024000000000000b27472616e736665725f74696d656f75745f73cb404e000000000000a76164617074"
        "6572a46d617468"
    ),
    "stock-announcement": (
        "01000588a776657273696f6e03a565706f636801a76261636b656e64a46e63636ca4686f7374a831302e302e302e31a4706f"
        "7274cd733cae6a6f696e5f74696d656f75745f73cb4024000000000000b27472616e736665725f74696d656f75745f73cb40"
        "4e000000000000a573746f636bc3"
    ),
    "status": (
        "01000689a9776f726b65725f6964a177a4686f7374a168a370696409a57374617465a773657276696e67a776657273696f6e"
        "03a56d6f64656ca16da772756e6e696e6702a468656c6403aa737461727465645f6174cb3ff8000000000000"
    ),
    "engine-status": (
        "0100068ea9776f726b65725f6964a177a4686f7374a168a370696409a57374617465a8647261696e696e67a776657273696f"
        "6e03a6656e67696e65a673676c616e67a6646576696365a3677075a774705f73697a6502a8666561747572657392a4736565"
        "64a673747265616dab6d61785f72756e6e696e6708b067656e6572617465645f746f6b656e73ce00011170b066696e697368"
        "65645f73616d706c657305b1726566757365645f7075626c697368657301af656e67696e655f726573746172747304"
    ),
    "control": ("01000783a6616374696f6ea5647261696ea9776f726b65725f6964a177a6706172616d7381a17801"),
}


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
        7: "Control",
    }


def test_arrays_come_back_as_what_they_were() -> None:
    sent = result(job(), token_ids=np.arange(5), segments=(Segment(1, 5),), logprobs=np.linspace(-1, 0, 5))
    back = decode(encode(sent), RolloutResult)
    assert back.token_ids.dtype == np.int32
    assert back.logprobs is not None
    assert back.logprobs.dtype == np.float32
    assert back.token_ids.tolist() == [0, 1, 2, 3, 4]
    assert back.segments == (Segment(1, 5),)
    with pytest.raises(ValueError, match="read-only"):
        back.token_ids[0] = 9


def test_an_empty_sample_travels() -> None:
    back = decode(encode(result(job(), token_ids=[], logprobs=[], segments=())), RolloutResult)
    assert back.token_ids.size == 0
    assert back.logprobs is not None
    assert back.logprobs.size == 0
    assert back.oldest_version is None


def test_a_message_does_not_change_with_the_array_it_was_made_of() -> None:
    prompt = np.array([1, 2, 3])
    made = job(token_ids=prompt)
    prompt[0] = 9
    assert made.token_ids is not None
    assert made.token_ids.tolist() == [1, 2, 3]


def test_logprobs_that_are_not_finite_travel_unchanged() -> None:
    """Policy: the codec carries NaN and infinities bit for bit; whether to train on them is the trainer's decision."""
    sent = result(job(), logprobs=[math.nan, -math.inf])
    back = decode(encode(sent), RolloutResult)
    assert back.logprobs is not None
    assert np.isnan(back.logprobs[0])
    assert back.logprobs[1] == -np.inf
    assert back == sent


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_newer_minor_decodes_without_its_new_fields() -> None:
    fields = {"token_ids": b"\x01\0\0\0", "id": ID, "temperature_schedule": [1, 2]}
    assert decode(frame(1, fields, minor=MINOR + 1), GenerateJob).id == ID
    with pytest.raises(InvalidField, match="temperature_schedule"):
        decode(frame(1, fields), GenerateJob)


def test_another_major_is_refused() -> None:
    for major in (MAJOR + 1, 0, 255):
        with pytest.raises(UnsupportedVersion, match=rf"version {major}\.0.*upgrade"):
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
        {"finish_reason": "abort"},
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
        {"logit_processors": (LogitProcessor(name="x", params={"a": object()}),)},
    ],
)
def test_what_cannot_travel_is_refused_by_encode(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        encode(job(**fields))


def test_a_message_no_decoder_would_accept_is_not_encoded() -> None:
    with pytest.raises(InvalidField, match="at most"):
        encode(job(metadata={str(i): "x" * (3 << 20) for i in range(23)}))


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
