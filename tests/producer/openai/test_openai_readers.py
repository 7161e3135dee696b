"""Answers hold what each reader of token ids, versions and log-probabilities looks for, and OpenAI's strict types."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from support.lazily import Lazily
from support.specimens import answers
from support.specimens.answers import decode

from rolloutmq.messages import RolloutResult, Segment
from rolloutmq.producer.calls import Delta
from rolloutmq.producer.openai import Request, chat_request, completion_request, response, stream_chunks
from rolloutmq.worker.cpu_support import prepare_transformers

types, chats = Lazily("openai.types"), Lazily("openai.types.chat")
streaming, trl = Lazily("openai.lib.streaming.chat"), Lazily("trl.generation.vllm_client")
IDS = [104, 105, 300]
PROMPT = [7, 8, 9, 10]
NOTHING = -30_000.0


def sample(request: Request, place: int = 0, number: int = 0, **fields: Any) -> RolloutResult:
    job = request.jobs[place]
    more: dict[str, Any] = {"cached_tokens": 2, "fingerprint": {"engine": "scripted", "model": "m"}}
    if job.token_ids is None:
        more["prompt_ids"] = PROMPT
    if job.logprobs.top:
        more["token_arrays"] = {
            "top_ids": np.array([[104, 97], [105, 98], [300, 99]], np.int32),
            "top_logprobs": np.array([[-0.5, -math.inf], [-1, math.nan], [0, -1]], np.float32),
        }
    return answers.sample(request, place, number, **more | fields)


def chat(**body: Any) -> Request:
    return chat_request({"model": "m", "messages": [{"role": "user", "content": "x"}], **body})


def completion(*prompts: list[int], **body: Any) -> Request:
    return completion_request({"model": "m", "prompt": list(prompts) or [PROMPT], **body})


EVERYTHING = {
    "return_token_ids": True,
    "return_prompt_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_weight_versions": True,
}


def strictly(answer: dict[str, Any]) -> Any:
    """The answer through JSON, which has no infinity, and through the types of OpenAI's package without coercion."""
    form = {
        "chat.completion": chats.ChatCompletion,
        "chat.completion.chunk": chats.ChatCompletionChunk,
        "text_completion": types.Completion,
    }[answer["object"]]
    return form.model_validate_json(json.dumps(answer, allow_nan=False), strict=True)


def test_what_vllms_and_sglangs_readers_ask_a_chat_for() -> None:
    request = chat(n=2, logprobs=True, top_logprobs=2, return_meta_info=True, **EVERYTHING)
    answer = response(request, [[sample(request), sample(request, number=1)]], decode)
    strictly(answer)
    assert answer["prompt_token_ids"] == PROMPT
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["token_ids"] == choice["response_token_ids"] == IDS
        content = choice["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["token_id:104", "token_id:105", "token_id:300"]
        assert [entry["token_id"] for entry in content] == IDS
        assert [entry["bytes"] for entry in content] == [[104], [105], []]
        assert content[0]["top_logprobs"] == [
            {"token": "token_id:104", "token_id": 104, "logprob": -0.5, "bytes": [104]},
            {"token": "token_id:97", "token_id": 97, "logprob": NOTHING, "bytes": [97]},
        ]
        assert content[1]["top_logprobs"][1]["logprob"] == NOTHING
        info = choice["meta_info"]
        assert info["output_token_logprobs"] == [[-0.5, 104, None], [-1.0, 105, None], [-0.25, 300, None]]
        assert (info["completion_tokens"], info["prompt_tokens"], info["cached_tokens"]) == (3, 4, 2)
        assert (info["finish_reason"], info["weight_version"]) == ({"type": "stop", "matched": 300}, "3")
        assert (info["weight_version_start"], info["weight_version_end"]) == (3, 4)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_versions_are_numbers_at_the_top_of_every_answer() -> None:
    request = chat(n=2)
    later = sample(request, number=1, segments=(Segment(5, 3),))
    answer = response(request, [[sample(request), later]])
    assert (answer["weight_version"], answer["weight_version_start"], answer["weight_version_end"]) == (3, 3, 5)
    assert "weight_version" not in response(chat(), [[None]])
    other = sample(request, fingerprint={"engine": "scripted", "model": "other"})
    named = [response(request, [[one, later]])["system_fingerprint"] for one in (sample(request), later, other)]
    assert named[0] == named[1] != named[2]


def test_only_what_is_asked_for_is_there() -> None:
    (choice,) = response(chat(logprobs=True), [[sample(chat(logprobs=True))]], decode)["choices"]
    assert {"token_ids", "prompt_token_ids", "response_token_ids", "meta_info", "weight_versions"}.isdisjoint(choice)
    request = chat(return_prompt_token_ids=True)
    answer = response(request, [[sample(request)]])
    assert answer["choices"][0]["prompt_token_ids"] == PROMPT
    assert {"prompt_token_ids"}.isdisjoint(answer)  # NeMo-Gym wants both, or none, of this and token_ids
    assert {"token_ids"}.isdisjoint(answer["choices"][0])


def test_nemo_gym_gets_all_three_fields_of_the_message_or_none() -> None:
    asked = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True}
    request = chat(**asked)
    message = response(request, [[sample(request)]], decode)["choices"][0]["message"]
    assert message["prompt_token_ids"] == PROMPT
    assert (message["generation_token_ids"], message["generation_log_probs"]) == (IDS, [-0.5, -1.0, -0.25])
    names = {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
    unknown = response(request, [[sample(request, prompt_ids=None)]], decode)["choices"][0]["message"]
    assert names.isdisjoint(unknown)
    assert names.isdisjoint(response(chat(), [[sample(chat())]])["choices"][0]["message"])
    again = chat_request({"messages": [{"role": "user", "content": "x"}, message]})  # as an agent sends it back
    assert again.jobs[0].messages is not None
    assert again.jobs[0].messages[1].content == "hi"


def test_what_trl_asks_a_completion_for() -> None:
    request = completion([1, 2], [3], n=2, logprobs=0, **EVERYTHING)
    found = [[sample(request, place, number) for number in range(2)] for place in range(2)]
    answer = response(request, found, decode)
    strictly(answer)
    assert answer["prompt_token_ids"] == [[1, 2], [3]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[1, 2], [1, 2], [3], [3]]
    logprobs = answer["choices"][0]["logprobs"]
    tokens = ["token_id:104", "token_id:105", "token_id:300"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (tokens, [-0.5, -1.0, -0.25])
    assert logprobs["top_logprobs"] == [{"token_id:104": -0.5}, {"token_id:105": -1.0}, {"token_id:300": -0.25}]


def test_the_sampled_token_is_among_the_likeliest_of_a_completion() -> None:
    request = completion(logprobs=2)
    rows = {"top_ids": np.array([[97, 98]], np.int32), "top_logprobs": np.array([[-0.1, -math.inf]], np.float32)}
    given = {"token_ids": [104], "logprobs": [-7.0], "segments": (Segment(3, 1),), "token_arrays": rows}
    (choice,) = response(request, [[sample(request, **given)]], decode)["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"h": -7.0, "a": np.float32(-0.1), "b": NOTHING}]


@pytest.mark.parametrize("bad", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("make", [chat, completion])
def test_logprobs_are_finite(make: Any, bad: float) -> None:
    request = make(logprobs=True if make is chat else 0)
    answer = response(request, [[sample(request, logprobs=[-0.5, bad, -0.25])]], decode)
    strictly(answer)
    found = answer["choices"][0]["logprobs"]
    values = [one["logprob"] for one in found["content"]] if make is chat else found["token_logprobs"]
    assert values == [-0.5, NOTHING, -0.25]
    assert math.isfinite(float(np.float16(NOTHING)))
    assert NOTHING != -9999.0


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("ends", ["stop", "length", "abort", None])
def test_every_end_parses_in_strict_types(make: Any, ends: str | None) -> None:
    request = make(logprobs=True if make is chat else 1, return_meta_info=True, **EVERYTHING)
    stop = 300 if ends == "stop" else None
    one = None if ends is None else sample(request, finish_reason=ends, matched_stop=stop)
    answer = response(request, [[one]], decode)
    finish = strictly(answer).choices[0].finish_reason
    assert finish == ("stop" if ends == "stop" else "length")
    assert answer["choices"][0]["stop_reason"] == {"stop": 300, "length": None}.get(ends or "", "abort")
    assert answer["choices"][0]["token_ids"] == ([] if ends is None else IDS)
    plain = response(replace(request, abort="abort"), [[one]], decode)["choices"][0]["finish_reason"]
    assert plain == (ends or "abort")


async def chunks(request: Request, *deltas: Delta) -> list[dict[str, Any]]:
    async def come() -> AsyncIterator[Delta]:
        for one in deltas:
            yield one

    return [chunk async for chunk in stream_chunks(request, come(), decode)]


def pieces(request: Request, whole: RolloutResult, place: int = 0) -> list[Delta]:
    """A delta for each token of a sample."""
    versions = [segment.version for segment in whole.segments for _ in range(segment.tokens)]
    return [
        Delta(
            request.jobs[place].id,
            whole.sample,
            start=at,
            token_ids=whole.token_ids[at : at + 1],
            logprobs=whole.logprobs[at : at + 1] if whole.logprobs is not None else None,
            segments=(Segment(versions[at], 1),),
            token_arrays={name: rows[at : at + 1] for name, rows in whole.token_arrays.items()},
            text=None if whole.text is None else decode([token]),
            result=whole if at == whole.token_ids.size - 1 else None,
        )
        for at, token in enumerate(whole.token_ids.tolist())
    ]


@pytest.mark.parametrize("make", [chat, completion])
async def test_a_stream_read_as_rllm_and_art_read_it(make: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2} if make is chat else {"logprobs": 2}
    ids = {"input_ids": PROMPT} if make is chat else {}
    request = make(stream=True, stream_options={"include_usage": True}, **asked, **ids, **EVERYTHING)
    found = await chunks(request, *pieces(request, whole := sample(request)))
    for chunk in found:
        ends = (
            {} if make is chat else {"finish_reason": "stop"}
        )  # OpenAI's type has no null there, its service sends it
        strictly(chunk | {"choices": [choice | ends for choice in chunk["choices"]]})
    first = found[0]
    assert first["prompt_token_ids"] == first["choices"][0]["prompt_token_ids"] == PROMPT
    assert all("prompt_token_ids" not in chunk for chunk in found[1:])
    choices = [chunk["choices"][0] for chunk in found if chunk["choices"]]
    assert [token for choice in choices for token in choice.get("token_ids", [])] == IDS
    assert [token for choice in choices for token in choice.get("response_token_ids", [])] == IDS
    shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if make is chat:
        read = [(entry["token"], entry["logprob"]) for one in shown for entry in one["content"]]
    else:
        read = [pair for one in shown for pair in zip(one["tokens"], one["token_logprobs"], strict=True)]
    assert whole.logprobs is not None
    assert read == [(f"token_id:{token}", value) for token, value in zip(IDS, whole.logprobs.tolist(), strict=True)]
    assert [chunk["weight_version"] for chunk in found if "weight_version" in chunk][-1] == 3
    ends = [chunk["weight_version_end"] for chunk in found if "weight_version_end" in chunk]
    assert (ends[0], ends[-1]) == (3, 4)
    assert choices[-1]["finish_reason"] == "stop"
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_streams_prompt_that_a_worker_rendered_comes_with_its_result() -> None:
    request = chat(stream=True, n=2, return_token_ids=True)
    both = [pieces(request, sample(request, number=number)) for number in range(2)]
    found = await chunks(request, *both[0], *both[1])
    having = [chunk for chunk in found if "prompt_token_ids" in chunk]
    assert [chunk["choices"][0]["index"] for chunk in having] == [0, 1]
    assert all(chunk["choices"][0]["finish_reason"] == "stop" for chunk in having)
    assert all(chunk["prompt_token_ids"] == PROMPT for chunk in having)


async def test_an_aborted_stream_parses_too() -> None:
    request = chat(stream=True)
    found = await chunks(request, *pieces(request, sample(request, finish_reason="abort", matched_stop=None)))
    assert strictly(found[-1]).choices[0].finish_reason == "length"
    assert found[-1]["choices"][0]["stop_reason"] == "abort"


async def test_versions_of_what_was_begun_again_are_forgotten() -> None:
    request = completion(stream=True)
    first, *_ = pieces(request, sample(request, segments=(Segment(1, 3),)))
    again = sample(request, segments=(Segment(6, 3),))
    whole = Delta(
        first.job_id, 0, 0, again.token_ids, again.logprobs, again.segments, text=None, restarted=True, result=again
    )
    found = await chunks(request, first, whole)
    assert [(chunk["weight_version_start"], chunk["weight_version_end"]) for chunk in found] == [(1, 1), (6, 6)]


async def test_offsets_of_a_streamed_completion_count_all_text() -> None:
    request = completion(stream=True, logprobs=0)
    whole = sample(request, token_ids=[*b"abcd"], logprobs=[-1.0] * 4, segments=(Segment(3, 4),), matched_stop=100)
    found = await chunks(request, *pieces(request, whole))
    offsets = [place for chunk in found for place in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2, 3]
    assert all(one < two for one, two in pairwise(offsets))


@pytest.mark.parametrize("make", [chat, completion])
def test_trls_own_function_reads_the_logprobs(make: Any) -> None:
    asked = {"logprobs": True, "top_logprobs": 2} if make is chat else {"logprobs": 2}
    prepare_transformers()  # before TRL imports it
    request = make(return_tokens_as_token_ids=True, return_token_ids=True, **asked)
    (choice,) = response(request, [[sample(request)]], decode)["choices"]
    values, ids = trl.parse_logprobs([choice["logprobs"]])
    assert ids[0][:2] == [[104, 97], [105, 98]]
    assert values[0][:2] == [[-0.5, NOTHING], [-1.0, NOTHING]]


async def test_openais_client_puts_a_stream_together_again() -> None:
    request = chat(input_ids=PROMPT, stream=True, logprobs=True, **EVERYTHING)
    state = streaming.ChatCompletionStreamState()
    for chunk in await chunks(request, *pieces(request, sample(request))):
        state.handle_chunk(chats.ChatCompletionChunk.model_validate(chunk, strict=True))
    (choice,) = state.get_final_completion().choices
    assert (choice.message.content, choice.finish_reason) == ("hi", "stop")
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content] == ["token_id:104", "token_id:105", "token_id:300"]
