"""OpenAI's own client, sync and async, against a gateway over a real engine. Every answer is validated by its types."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from support.engines.asking import judged
from support.engines.remote import RemoteEngine
from support.engines.text_requests import ids_of
from support.pools.pool import eventually
from support.pools.served import Served, gateway

from rolloutmq import BlockingRolloutClient
from rolloutmq.ops.gateway.tenants import new_key
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
MODEL = "tiny"
TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""
TALK = [{"role": "user", "content": "How far is it?"}]
NO_SPACE = {"logit_bias": {str(token): -100 for token in ids_of(" \t\n\r")}}
"""A schema allows any number of spaces, of which a random model may be fond."""
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "…", "parameters": CITY}}
    for name in ("get_weather", "get_time")
]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="module")
def server(
    redis_url: str, text_engine: RemoteEngine, text_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with text_engine.worker(redis_url), gateway(redis_url, log, "--served-model-name", MODEL) as started:
        yield started


@pytest.fixture(scope="module")
def judge(text_model: Path) -> Any:
    return load_tiny_model(text_model).eval()


@pytest.fixture(scope="module")
def tokenizer(text_model: Path) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    return AutoTokenizer.from_pretrained(text_model)


Ask = Callable[[Any], Any]


async def both(server: Served, ask: Ask, **options: Any) -> list[Any]:
    """What a sync and an async client make of the same call; a stream as the list of its chunks."""
    settings = {"base_url": f"{server.url}/v1", "api_key": "none", "_strict_response_validation": True} | options

    def plainly() -> Any:
        with OpenAI(**settings) as client:
            found = ask(client)
            return list(found) if isinstance(found, openai.Stream) else found

    async with AsyncOpenAI(**settings) as client:
        found = await ask(client)
        if isinstance(found, openai.AsyncStream):
            found = [chunk async for chunk in found]
    return [await asyncio.to_thread(plainly), found]


def chat(**body: Any) -> Ask:
    extra = {"return_token_ids": True} | body.pop("extra_body", {})
    body = {"model": MODEL, "messages": TALK, "max_tokens": 24, "temperature": 1.0} | body
    return lambda client: client.chat.completions.create(**body, extra_body=extra)


def check(judge: Any, prompt: list[int], choice: Any) -> None:
    """The log-probabilities of a chat's choice are the model's own, and so are the likeliest."""
    ids, content = choice.token_ids, choice.logprobs.content
    own = judged(judge, [*prompt, *ids])[len(prompt) - 1 : -1]
    np.testing.assert_allclose([it.logprob for it in content], own[np.arange(len(ids)), ids], atol=TOLERANCE)
    for row, it in zip(own, content, strict=True):
        top = np.sort(row)[::-1][: len(it.top_logprobs)]
        np.testing.assert_allclose([other.logprob for other in it.top_logprobs], top, atol=TOLERANCE)


async def test_models(server: Served, text_engine: RemoteEngine) -> None:
    for page in await both(server, lambda client: client.models.list()):
        (model,) = page.data
        assert (model.id, model.object, model.max_model_len) == (MODEL, "model", text_engine.info.context_length)


async def test_a_chat_with_several_answers(server: Served, judge: Any, tokenizer: Any) -> None:
    rendered = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    for answer in await both(server, chat(n=3, logprobs=True, top_logprobs=2, seed=11)):
        assert answer.prompt_token_ids == rendered
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
        for choice in answer.choices:
            check(judge, rendered, choice)
            assert choice.finish_reason == ("length" if len(choice.token_ids) == 24 else "stop")
            assert (choice.message.content or "") == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
        generated = sum(len(choice.token_ids) for choice in answer.choices)
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(rendered), generated)
        assert usage.total_tokens == len(rendered) + generated
        assert int(answer.weight_version) == 0


async def test_a_stream_says_what_an_answer_says(server: Served) -> None:
    asked = {"n": 2, "logprobs": True, "temperature": 0.0}
    whole, again = await both(server, chat(**asked))
    assert [choice.token_ids for choice in whole.choices] == [choice.token_ids for choice in again.choices]
    streams = await both(server, chat(**asked, stream=True, stream_options={"include_usage": True}))
    for chunks in streams:
        *parts, last = chunks
        assert (last.choices, last.usage) == ([], whole.usage)
        assert parts[0].prompt_token_ids == whole.prompt_token_ids
        assert len({chunk.id for chunk in chunks}) == 1
        for choice in whole.choices:
            mine = [part for chunk in parts for part in chunk.choices if part.index == choice.index]
            assert len(mine) > 1
            assert "".join(part.delta.content or "" for part in mine) == (choice.message.content or "")
            assert list(itertools.chain(*(getattr(part, "token_ids", None) or [] for part in mine))) == choice.token_ids
            content = [it for part in mine if part.logprobs for it in part.logprobs.content]
            np.testing.assert_allclose(
                [it.logprob for it in content], [it.logprob for it in choice.logprobs.content], atol=TOLERANCE
            )
            assert [part.finish_reason for part in mine][-1] == choice.finish_reason


async def test_a_stop_text_ends_an_answer_and_is_not_in_it(server: Served) -> None:
    (whole, _) = await both(server, chat(temperature=0.0))
    text = whole.choices[0].message.content
    stop = text[len(text) // 2]
    for answer in await both(server, chat(temperature=0.0, stop=[stop, "none of it"])):
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_have_to_be_made(server: Served, choice: str, stream: bool) -> None:
    said = "required" if choice == "required" else {"type": "function", "function": {"name": "get_time"}}
    asked = {"model": MODEL, "messages": TALK, "tools": TOOLS, "tool_choice": said, "max_tokens": 400}
    for one in (True, False):
        body = asked | NO_SPACE | {"parallel_tool_calls": not one}
        for calls, finish in await called(server, body, stream):
            assert finish == "tool_calls"
            assert len(calls) == 1 or not one
            for name, arguments in calls:
                assert name in ({"get_time"} if choice == "named" else {"get_time", "get_weather"})
                assert json.loads(arguments)["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_that_a_model_makes_by_itself(server: Served, stream: bool) -> None:
    """Two in one answer. The model is random, so a grammar has it say them."""
    call = r'<tool_call>\n\{{"name": "{}", "arguments": \{{"city": "(Rome|Oslo)"\}}\}}\n</tool_call>'
    regex = r"\n".join(call.format(name) for name in ("get_weather", "get_time"))
    extra = {"regex": regex, "tool_parser": "json"}
    asked = {"model": MODEL, "messages": TALK, "tools": TOOLS, "max_tokens": 400, "extra_body": extra}
    for calls, finish in await called(server, asked, stream):
        assert finish == "tool_calls"
        assert [name for name, _ in calls] == ["get_weather", "get_time"]
        assert all(json.loads(arguments)["city"] in ("Rome", "Oslo") for _, arguments in calls)


async def called(server: Served, body: dict[str, Any], stream: bool) -> list[tuple[list[tuple[str, str]], str]]:
    """Of each client the calls as (name, arguments), and why the answer ended."""
    answers = await both(server, lambda client: client.chat.completions.create(**body, stream=stream))
    if not stream:
        return [([_call(it) for it in answer.choices[0].message.tool_calls], _finish(answer)) for answer in answers]
    found = []
    for chunks in answers:
        calls: dict[int, list[str]] = {}
        for part in (part for chunk in chunks for part in chunk.choices):
            for it in part.delta.tool_calls or []:
                call = calls.setdefault(it.index, ["", ""])
                call[0] += it.function.name or ""
                call[1] += it.function.arguments or ""
        found.append(([(name, text) for name, text in calls.values()], _finish(chunks[-1])))
    return found


def _call(it: Any) -> tuple[str, str]:
    assert it.id
    return it.function.name, it.function.arguments


def _finish(answer: Any) -> str:
    return str(answer.choices[0].finish_reason)


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    by_train: bool


async def test_an_answer_in_a_form(server: Served) -> None:
    asked = {"model": MODEL, "messages": TALK, "max_tokens": 400} | NO_SPACE
    for answer in await both(server, lambda client: client.chat.completions.parse(**asked, response_format=Trip)):
        assert isinstance(answer.choices[0].message.parsed, Trip)
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": Trip.model_json_schema(), "strict": True}}
    for answer in await both(server, chat(**asked, response_format=form)):
        Trip.model_validate_json(answer.choices[0].message.content)


async def test_completions(server: Served, judge: Any, tokenizer: Any) -> None:
    texts = ["How far", "Weit"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]

    def ask(prompt: Any, **more: Any) -> Ask:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "logprobs": 1, "n": 2, "temperature": 0.0} | more
        return lambda client: client.completions.create(**body, extra_body={"return_token_ids": True})

    by_ids, by_text = await both(server, ask(prompts)), await both(server, ask(texts))
    for answer in [*by_ids, *by_text]:
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices] == [choice.text for choice in by_ids[0].choices]
        for choice in answer.choices:
            prompt, ids = prompts[choice.index // 2], choice.token_ids
            assert choice.prompt_token_ids == prompt
            own = judged(judge, [*prompt, *ids])[len(prompt) - 1 : -1]
            found = choice.logprobs.token_logprobs
            np.testing.assert_allclose(found, own[np.arange(len(ids)), ids], atol=TOLERANCE)
        assert answer.usage.prompt_tokens == sum(map(len, prompts))
    # The client's own type of a chunk is wrong: in OpenAI's streams, too, only the last one has a finish_reason.
    for chunks in await both(server, ask(prompts, stream=True), _strict_response_validation=False):
        for choice in by_ids[0].choices:
            mine = [part.text for chunk in chunks for part in chunk.choices if part.index == choice.index]
            assert "".join(mine) == choice.text


REFUSED = {
    "max_tokens": (chat(max_tokens=-1), openai.BadRequestError, "max_tokens"),
    "messages": (chat(messages=[]), openai.BadRequestError, "messages"),
    "too long": (chat(messages=[{"role": "user", "content": "x" * 4000}]), openai.BadRequestError, "context length"),
    "tool_choice": (chat(tool_choice="required"), openai.BadRequestError, "tool_choice"),
    "model": (chat(model="gpt-9"), openai.NotFoundError, "gpt-9"),
    "path": (lambda client: client.files.list(), openai.NotFoundError, "404"),
    "version": (chat(extra_body={"weight_version": {"exact_version": 99}}), openai.ConflictError, "99"),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_what_is_refused_is_the_clients_own_error(server: Served, why: str) -> None:
    ask, error, said = REFUSED[why]
    for kind in (OpenAI, AsyncOpenAI):
        with pytest.raises(error, match=said) as refused:
            await only(server, kind, ask, max_retries=0)
        assert refused.value.body is not None


async def only(server: Served, kind: Any, ask: Ask, **options: Any) -> Any:
    client = kind(**{"base_url": f"{server.url}/v1", "api_key": "none"} | options)
    return await ask(client) if kind is AsyncOpenAI else await asyncio.to_thread(ask, client)


async def test_who_waits_no_longer_takes_nothing_more_of_the_pool(server: Served, redis_url: str) -> None:
    long = chat(max_tokens=2000, extra_body={"ignore_eos": True})
    with BlockingRolloutClient(redis_url) as pool:
        for kind in (OpenAI, AsyncOpenAI):
            with pytest.raises(openai.APITimeoutError):
                await only(server, kind, long, timeout=0.5, max_retries=0)
            await eventually(lambda: pool.load().open_jobs == 0, what="its job was cancelled")


async def test_keys_rates_and_a_key_used_twice(redis_url: str, server: Served, tmp_path: Path) -> None:
    (slow, slows), (free, frees) = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[tenants.slow]\nkeys = ["{slows}"]\nrequests_per_minute = 1\n[tenants.free]\nkeys = ["{frees}"]\n'
    )
    keys.chmod(0o600)
    with gateway(redis_url, tmp_path / "guarded.log", "--keys", str(keys), "--served-model-name", MODEL) as guarded:
        short = chat(max_tokens=1)
        with pytest.raises(openai.AuthenticationError, match="key"):
            await only(guarded, OpenAI, short)
        await only(guarded, AsyncOpenAI, short, api_key=slow)
        with pytest.raises(openai.RateLimitError) as refused:
            await only(guarded, AsyncOpenAI, short, api_key=slow, max_retries=0)
        assert float(refused.value.response.headers["retry-after"]) > 0

        def named(content: str) -> Ask:
            said = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
            return lambda client: client.chat.completions.create(**said, extra_headers={"Idempotency-Key": "one"})

        first, again = await both(guarded, named("a"), api_key=free)
        assert first.choices == again.choices, "it was generated once"
        with pytest.raises(openai.UnprocessableEntityError, match="one"):
            await only(guarded, OpenAI, named("b"), api_key=free)
