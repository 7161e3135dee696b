"""Results as OpenAI's answers and chunks; errors as theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from support.lazily import Lazily
from support.specimens.answers import decode, sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rolloutmq.messages import (
    InvalidField,
    JobFailed,
    JobFailure,
    PoolBusy,
    RedisUnavailable,
    RolloutResult,
    Segment,
    WaitTimeout,
)
from rolloutmq.messages.errors import ConfigError, FeatureUnavailable
from rolloutmq.messages.model.tools import ToolCall
from rolloutmq.producer.calls import Delta
from rolloutmq.producer.openai import (
    GrowingText,
    Request,
    bytes_reader,
    chat_request,
    completion_request,
    error_of,
    response,
    stream_chunks,
)

types, chats = Lazily("openai.types"), Lazily("openai.types.chat")
BYTES = "aé€😀".encode()
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def chat(**body: Any) -> Request:
    return chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **body})


def test_a_chat() -> None:
    request = chat(n=2)
    answer = response(request, [[sample(request), sample(request, number=1, finish_reason="length")]])
    assert (answer["object"], answer["model"], answer["id"]) == (
        "chat.completion",
        "m",
        f"chatcmpl-{request.jobs[0].id}",
    )
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    first, second = answer["choices"]
    assert first["message"] == {"role": "assistant", "content": "hi"}
    assert (first["finish_reason"], first["stop_reason"], first["logprobs"]) == ("stop", 300, None)
    assert second["finish_reason"] == "length"
    assert "token_ids" not in first
    assert "weight_versions" not in first
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "total_tokens": 8}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_ids_versions_and_logprobs_when_asked_for() -> None:
    request = chat(logprobs=True, top_logprobs=2, return_token_ids=True, return_weight_versions=True)
    top = {
        "top_ids": np.array([[104, 97], [105, 98], [300, 99]], np.int32),
        "top_logprobs": np.array([[-0.5, -2.0], [-1.0, -3.0], [-0.25, -4.0]], np.float32),
    }
    answer = response(request, [[sample(request, token_arrays=top)]], decode)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == [1, 2]
    assert choice["token_ids"] == [104, 105, 300]
    assert choice["weight_versions"] == [{"version": 3, "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 3}]
    content = choice["logprobs"]["content"]
    assert [(one["token"], one["logprob"], one["bytes"]) for one in content] == [
        ("h", -0.5, [104]),
        ("i", -1.0, [105]),
        ("", -0.25, []),
    ]
    assert [(one["token"], one["logprob"]) for one in content[0]["top_logprobs"]] == [("h", -0.5), ("a", -2.0)]


def test_completions_of_ids_and_logprobs_without_a_tokenizer() -> None:
    request = completion_request({"prompt": [[1, 2, 3], [4]], "n": 2, "logprobs": 0})
    results = [[sample(request, place, number) for number in range(2)] for place in range(2)]
    answer = response(request, results, decode)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(i, "hi") for i in range(4)]
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["h", "i", ""],
        "token_logprobs": [-0.5, -1.0, -0.25],
        "top_logprobs": [{"h": -0.5}, {"i": -1.0}, {"": -0.25}],
        "text_offset": [0, 1, 2],
    }
    assert answer["usage"]["total_tokens"] == 4 + 12
    bare = response(request, results)["choices"][0]["logprobs"]
    assert bare["tokens"] == ["token_id:104", "token_id:105", "token_id:300"]


def byte_level() -> Tokenizer:
    """A tokenizer of GPT-2's kind whose tokens are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_byte_tokens() -> Tokenizer:
    """A tokenizer of Llama's first kind, which writes a byte as <0xE2>."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


@pytest.mark.parametrize("tokenizer", [byte_level(), with_byte_tokens()])
def test_bytes_of_parts_of_characters_are_the_real_ones(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(BYTES.decode()).ids
    assert len(ids) == len(BYTES)
    request = chat(logprobs=True, top_logprobs=1)
    top = {"top_ids": np.array(ids, np.int32)[:, None], "top_logprobs": np.zeros((len(ids), 1), np.float32)}
    made = {"token_ids": ids, "logprobs": [0.0] * len(ids), "segments": (Segment(3, len(ids)),), "token_arrays": top}
    result = sample(request, **made)
    answer = response(request, [[result]], tokenizer.decode, bytes_reader(tokenizer))
    content = chats.ChatCompletion.model_validate(answer).choices[0].logprobs.content
    assert content is not None
    assert bytes(byte for entry in content for byte in entry.bytes or ()) == BYTES
    assert [entry.top_logprobs[0].bytes for entry in content] == [entry.bytes for entry in content]
    bare = response(request, [[result]], tokenizer.decode)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in bare] == [[97]] + [None] * (len(BYTES) - 1)


def test_tokens_of_one_text_have_their_own_logprobs() -> None:
    request = completion_request({"prompt": [1], "logprobs": 3})
    top = {"top_ids": np.array([[0xE2, 300, 0x82]], np.int32), "top_logprobs": np.array([[-1, -2, -3]], np.float32)}
    result = sample(request, token_ids=[0xE2], logprobs=[-1.0], segments=(Segment(3, 1),), token_arrays=top)
    answer = response(request, [[result]], decode)
    (found,) = types.Completion.model_validate(answer).choices[0].logprobs.top_logprobs
    assert found == {"\ufffd": -1.0, "": -2.0, "token_id:130": -3.0}


STOPPED = {"token_ids": [*b"ab END cd"], "logprobs": [-0.5] * 9, "segments": (Segment(3, 9),), "matched_stop": "END"}


@pytest.mark.parametrize(
    ("said", "result", "text"),
    [
        ({}, {}, "ab "),
        ({"include_stop_str_in_output": True}, {}, "ab END cd"),
        ({}, {"finish_reason": "length", "matched_stop": None}, "ab END cd"),
        ({}, {"matched_stop": 100}, "ab END cd"),
        ({"min_tokens": 4, "stop": ["END", " "]}, {"matched_stop": " "}, "ab END"),
    ],
)
async def test_the_stop_is_not_in_the_text(said: dict[str, Any], result: dict[str, Any], text: str) -> None:
    request = completion_request({"prompt": [1], "stop": ["END"], "return_token_ids": True, "stream": True} | said)
    end = sample(request, **STOPPED | result)
    (choice,) = response(request, [[end]], decode)["choices"]
    assert (choice["text"], choice["token_ids"]) == (text, STOPPED["token_ids"])
    ids = STOPPED["token_ids"]
    for size in (1, 2, 4, 9):
        starts = range(0, len(ids), size)
        last = starts[-1]
        pieces = [delta(request, at, ids[at : at + size], result=end if at == last else None) for at in starts]
        found = await chunks(request, *pieces)
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == text
        assert [token for chunk in found for token in chunk["choices"][0]["token_ids"]] == ids


async def test_a_text_that_only_begins_like_a_stop_is_shown() -> None:
    request = completion_request({"prompt": [1], "stop": ["ENDE", "DA"], "stream": True})
    ids = [*b"an END EN"]
    end = sample(request, token_ids=ids, logprobs=None, finish_reason="length", segments=(Segment(3, len(ids)),))
    pieces = [delta(request, at, [token]) for at, token in enumerate(ids[:-1])]
    found = await chunks(request, *pieces, delta(request, len(ids) - 1, ids[-1:], result=end))
    texts = [chunk["choices"][0]["text"] for chunk in found]
    assert "".join(texts) == "an END EN"
    assert texts[:4] == ["a", "n", " ", "END "]


async def test_a_call_of_a_function_in_the_older_form() -> None:
    request = chat(functions=[TOOL["function"]], stream=True)
    end = sample(request, tool_calls=(ToolCall(id="c1", name="add", arguments={"a": 1}),))
    answer = chats.ChatCompletion.model_validate(response(request, [[end]]))
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("function_call", None, None)
    assert choice.message.function_call is not None
    assert choice.message.function_call.model_dump() == {"name": "add", "arguments": '{"a": 1}'}
    found = await chunks(request, delta(request, 0, [104, 105, 300], result=end, text="hi"))
    last = chats.ChatCompletionChunk.model_validate(found[-1]).choices[0]
    assert last.finish_reason == "function_call"
    assert last.delta.function_call is not None
    assert last.delta.function_call.name == "add"


def test_calls_of_tools() -> None:
    request = chat(tools=[TOOL])
    calls = (ToolCall(id="c1", name="add", arguments={"a": 1}), ToolCall(id="c2", error="no", text="<bad>"))
    (choice,) = response(request, [[sample(request, tool_calls=calls)]])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert (call["id"], call["type"], call["function"]) == ("c1", "function", {"name": "add", "arguments": '{"a": 1}'})
    (choice,) = response(request, [[sample(request, tool_calls=calls[1:])]])["choices"]
    assert (choice["finish_reason"], choice["message"]) == ("stop", {"role": "assistant", "content": "hi"})


def test_calls_that_were_required() -> None:
    request = chat(tools=[TOOL], tool_choice="required")
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "add", "parameters": {}}]'
    (choice,) = response(request, [[sample(request, text=text)]])["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["arguments"] for call in calls] == ['{"a": 1}', "{}"]
    assert len({call["id"] for call in calls}) == 2
    (choice,) = response(request, [[sample(request, text=text[:20], finish_reason="length")]])["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", text[:20])
    one = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (choice,) = response(one, [[sample(one, text=text)]])["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def delta(request: Request, start: int, ids: list[int], result: RolloutResult | None = None, **more: Any) -> Delta:
    given: dict[str, Any] = {
        "job_id": request.jobs[0].id,
        "sample": 0,
        "start": start,
        "token_ids": np.array(ids, np.int32),
        "logprobs": np.full(len(ids), -0.5, np.float32),
        "segments": (Segment(3, len(ids)),),
        "result": result,
    }
    return Delta(**given | more)


async def chunks(request: Request, *deltas: Delta) -> list[dict[str, Any]]:
    async def come() -> AsyncIterator[Delta]:
        for one in deltas:
            yield one

    return [chunk async for chunk in stream_chunks(request, come(), decode)]


async def test_a_stream_of_a_chat() -> None:
    request = chat(stream=True, stream_options={"include_usage": True}, return_weight_versions=True)
    assert request.jobs[0].stream
    end = sample(request)
    found = await chunks(
        request, delta(request, 0, [104], text="h"), delta(request, 1, [105, 300], result=end, text="i")
    )
    assert {chunk["id"] for chunk in found} == {f"chatcmpl-{request.jobs[0].id}"}
    assert [chunk["choices"][0]["delta"] for chunk in found[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "i"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]] == [None, None, "stop"]
    assert found[2]["choices"][0]["weight_versions"] == [{"version": 3, "start": 1, "end": 3}]
    assert (found[-1]["choices"], found[-1]["usage"]["completion_tokens"]) == ([], 3)


async def test_a_stream_of_a_completion_of_ids_shows_whole_characters() -> None:
    request = completion_request({"prompt": [1], "stream": True, "logprobs": 0})
    ids = list(BYTES)
    pieces = [delta(request, i, [token]) for i, token in enumerate(ids[:-1])]
    result = sample(request, token_ids=ids, logprobs=[-0.5] * len(ids), segments=(Segment(3, len(ids)),))
    found = await chunks(request, *pieces, delta(request, len(ids) - 1, ids[-1:], result=result))
    texts = [chunk["choices"][0]["text"] for chunk in found]
    assert "".join(texts) == BYTES.decode()
    assert "\ufffd" not in "".join(texts)
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_a_stream_has_the_logprobs_and_versions_of_tokens_without_visible_text(kind: str) -> None:
    asked = {"stream": True, "return_weight_versions": True}
    if kind == "chat":
        request = chat(**asked, logprobs=True, top_logprobs=1)
    else:
        request = completion_request({"prompt": [1], "logprobs": 1} | asked)
    ids = [*"é€".encode(), 300, 300]
    values = np.arange(len(ids), dtype=np.float32)
    segments = [Segment(3 + i // 2, 1) for i in range(len(ids))]

    def piece(i: int, **more: Any) -> Delta:
        top = {"top_ids": np.array([[ids[i]]], np.int32), "top_logprobs": np.array([[-0.25]], np.float32)}
        given = {"logprobs": values[i : i + 1], "segments": (segments[i],), "token_arrays": top}
        text = {"text": {1: "é", 4: "€"}.get(i, "")} if kind == "chat" else {}
        return delta(request, i, [ids[i]], **given | text | more)

    end = sample(request, token_ids=ids, logprobs=list(values), segments=tuple(segments))
    again = piece(0, restarted=True)
    found = await chunks(request, again, *map(piece, range(1, len(ids) - 1)), piece(len(ids) - 1, result=end))
    choices = [chunk["choices"][0] for chunk in found][1 if kind == "chat" else 0 :]
    spans = [span for choice in choices for span in choice["weight_versions"]]
    assert [v for one in spans for v in [one["version"]] * (one["end"] - one["start"])] == [s.version for s in segments]
    assert [one["start"] for one in spans[1:]] == [one["end"] for one in spans[:-1]]
    shown = [choice["logprobs"] for choice in choices]
    if kind == "chat":
        entries = [entry for one in shown for entry in one["content"]]
        assert [(entry["logprob"], len(entry["top_logprobs"])) for entry in entries] == [(v, 1) for v in values]
    else:
        assert [value for one in shown for value in one["token_logprobs"]] == values.tolist()
        assert sum(len(one["top_logprobs"]) for one in shown) == len(ids)
    assert [choice.get("restarted", False) for choice in choices] == [True, False, False]


async def test_a_stream_with_tools_shows_nothing_before_it_is_whole() -> None:
    request = chat(stream=True, tools=[TOOL])
    end = sample(request, tool_calls=(ToolCall(id="c1", name="add", arguments={}),))
    found = await chunks(
        request, delta(request, 0, [104], text="h"), delta(request, 1, [105, 300], result=end, text="i")
    )
    assert len(found) == 2
    choice = found[1]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["tool_calls"][0] | {"id": "", "type": ""} == {
        "index": 0,
        "id": "",
        "type": "",
        "function": {"name": "add", "arguments": "{}"},
    }


async def test_a_sample_that_was_begun_again_says_so() -> None:
    request = completion_request({"prompt": [1], "stream": True})
    found = await chunks(
        request, delta(request, 0, [104]), delta(request, 0, [105, 106], restarted=True, result=sample(request))
    )
    assert [chunk["choices"][0]["text"] for chunk in found] == ["h", "ij"]
    assert found[1]["choices"][0]["restarted"] is True


def test_growing_text_is_the_text_of_all_ids_in_whatever_pieces() -> None:
    rng = np.random.default_rng(0)
    ids = [*list(("aé€😀 " * 60).encode()), 300]
    for _ in range(50):
        growing, shown, place = GrowingText(decode), "", 0
        while place < len(ids):
            size = int(rng.integers(1, 9))
            shown += growing.add(ids[place : place + size], last=place + size >= len(ids))
            place += size
        assert shown == growing.text == decode(ids)


def test_growing_text_ends_with_half_a_character_only_at_the_end() -> None:
    growing = GrowingText(decode)
    assert growing.add([0xE2, 0x82]) == ""
    assert growing.add([], last=True) == "\ufffd"


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (InvalidField("n", 0, "at least 1"), 400, "invalid_request_error"),
        (FeatureUnavailable("seed", 1, "nothing"), 400, "unsupported_by_pool"),
        (JobFailed(JobFailure(job_id="a", outcome="expired", cause="late")), 504, "timeout_error"),
        (JobFailed(JobFailure(job_id="a", outcome="cancelled", cause="by x")), 408, "request_cancelled"),
        (JobFailed(JobFailure(job_id="a", outcome="dead", cause="lost")), 500, "server_error"),
        (WaitTimeout("late"), 504, "timeout_error"),
        (PoolBusy("full", []), 429, "rate_limit_error"),
        (RedisUnavailable("gone"), 503, "service_unavailable_error"),
        (ConfigError("wrong"), 500, "server_error"),
    ],
)
def test_errors(error: Any, code: int, kind: str) -> None:
    told = error_of(error)["error"]
    assert (told["code"], told["type"]) == (code, kind)
    assert told["message"]
