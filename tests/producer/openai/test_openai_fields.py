"""What becomes of a body's fields: unknown names, lengths, priorities, versions, adapters, ids, templates."""

from __future__ import annotations

import ast
import contextlib
import logging
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError, UndefinedError
from support.lazily import Lazily

from rolloutmq.messages import GenerateJob, InvalidField
from rolloutmq.producer.openai import chat_request, completion_request, embedding_job, error_of, fields

USER = {"role": "user", "content": "hé"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
VARIABLES: dict[str, Any] = {}


def render(messages: Sequence[dict[str, Any]], answer: bool = True, **options: Any) -> list[int]:
    """A character of content is a token. Options are noted."""
    VARIABLES.clear()
    VARIABLES.update(options, answer=answer)
    return [ord(char) for message in messages for char in message["content"]]


def chat(**body: Any) -> Any:
    return chat_request({"model": "m", "messages": [USER], **body}, render=render, context_length=100)


def job_of(**body: Any) -> GenerateJob:
    (job,) = chat(**body).jobs
    assert isinstance(job, GenerateJob)
    return job


FROM_THE_CONTRACT = (
    *("routed_experts_prompt_start", "output_kind", "min_p", "cache_salt", "extra_key", "kv_transfer_params"),
    *("routing_key", "rid", "request_id", "user", "features", "content_parts", "custom_labels", "enqueue"),
    *("mm_processor_kwargs", "include_reasoning", "add_special_tokens", "vllm_xargs", "bootstrap_room", "documents"),
)


def names_of_sglang() -> list[str]:
    """The fields of SGLang's own requests."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    (path,) = {Path(one) / "srt/entrypoints/openai/protocol.py" for one in spec.submodule_search_locations}
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    wanted = [one for one in classes if one.name in {"ChatCompletionRequest", "CompletionRequest"}]
    assert len(wanted) == 2
    found = [node.target for one in wanted for node in one.body if isinstance(node, ast.AnnAssign)]
    return sorted({target.id for target in found if isinstance(target, ast.Name) and target.id[0] != "_"})


@pytest.mark.parametrize("names", [lambda: FROM_THE_CONTRACT, names_of_sglang], ids=["contract", "SGLang's"])
def test_no_field_of_another_server_is_taken_for_a_misspelt_one(names: Any) -> None:
    assert len(names()) > 10
    assert [name for name in names() if name not in fields.KNOWN and fields.misspelt(name) not in {"", name}] == []


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields.logged.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            chat(routing_hints={"a": 1}, request_id="r", user="u", cache_salt="7", **{"two\nlines": 1})
    shown = [record.getMessage() for record in caplog.records]
    assert shown == [
        "routing_hints in a request's body is ignored: it is not known here",
        "two\\nlines in a request's body is ignored: it is not known here",
    ]
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            chat(**{f"z{number}": 1})
    assert len(caplog.records) == len(fields.logged) == 256


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("temprature", "temperature"), ("maxTokens", "max_tokens"), ("topp", "top_p"), ("logprob", "logprobs")),
        *(("tool_choise", "tool_choice"), ("return_token_id", "return_token_ids"), ("stop_sequence", "stop_sequences")),
    ],
)
def test_a_misspelt_name_is_refused(name: str, meant: str) -> None:
    with pytest.raises(InvalidField, match=f"^{name}=1: .*mean {meant}"):
        chat(**{name: 1})
    chat(**{name: None})  # says nothing


def test_a_body_of_made_up_names_is_refused_before_they_are_compared() -> None:
    with pytest.raises(InvalidField, match="body='65 unknown fields': at most 64"):
        chat(**{f"temperature{number}" * 100: 1 for number in range(65)})


@pytest.mark.parametrize("seed", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1, -2, -(1 << 63)])
def test_any_seed_of_64_bits_is_taken(seed: int) -> None:
    assert job_of(seed=seed).seed == seed % (1 << 63)
    assert job_of(seed=-1).seed is None  # vLLM's "none"


@pytest.mark.parametrize(
    ("said", "priority"), [(-5, "high"), (0, "normal"), (7, "low"), ("high", "high"), (None, "normal")]
)
def test_a_number_as_priority_is_vllms(said: Any, priority: str) -> None:
    assert job_of(priority=said).priority == priority


@pytest.mark.parametrize("said", [True, 1.5, "urgent"])
def test_what_is_no_priority(said: Any) -> None:
    with pytest.raises(InvalidField, match="priority="):
        job_of(priority=said)


def test_deadlines_have_two_names() -> None:
    assert job_of(timeout=5).deadline_s == 5
    assert job_of(deadline_s=3, timeout=5).deadline_s == 3


def test_versions_as_miles_contract_has_them() -> None:
    assert job_of(weight_version={"min_version": 4, "exact_version": None}).min_version == 4
    assert job_of(weight_version={}).min_version == 0
    exact = {"exact_version": 7, "min_version": 9}  # the exact one wins
    assert fields.queue_fields({"weight_version": exact}) == {"exact_version": 7}
    for wrong in (5, "5", {"version": 5}, [4]):
        with pytest.raises(InvalidField, match=r"weight_version=.*an object with exact_version or min_version"):
            job_of(weight_version=wrong)


@pytest.mark.parametrize(
    ("model", "more", "lora"),
    [("m", {}, None), ("a", {}, "a"), ("org/m:a", {}, "a"), ("m:b", {}, None), ("m", {"lora_path": "x"}, "x")],
)
def test_a_model_may_be_an_adapter(model: str, more: dict[str, Any], lora: str | None) -> None:
    body = {"model": model, "messages": [USER], **more}
    assert chat_request(body, {"lora": "default"}, adapters={"a"}).jobs[0].lora == (lora or "default")
    request = chat_request(body, adapters={"a"})
    assert (request.jobs[0].lora, request.model) == (lora, model)
    assert completion_request({"model": model, "prompt": "x", **more}, adapters={"a"}).jobs[0].lora == lora


def test_an_answer_without_a_limit_has_the_rest_of_the_context() -> None:
    assert job_of().sampling.max_new_tokens == 100 - 2
    assert job_of(min_tokens=90).sampling.max_new_tokens == 98
    assert job_of(input_ids=[1] * 60).sampling.max_new_tokens == 40
    assert job_of(max_completion_tokens=5).sampling.max_new_tokens == 5
    long = chat_request(
        {"messages": [USER], "top_logprobs": 20, "logprobs": True}, None, render, context_length=1 << 20
    )
    assert long.jobs[0].sampling.max_new_tokens == 1 << 17
    given = chat_request({"messages": [USER]}, {"max_generate_length": 9}, render, context_length=100)
    assert given.jobs[0].sampling.max_new_tokens == 9


def test_a_completion_without_a_limit_has_openais_16_tokens() -> None:
    assert completion_request({"prompt": "a"}).jobs[0].sampling.max_new_tokens == 16
    jobs = completion_request({"prompt": [[1] * 30, [1] * 5]}, context_length=40).jobs
    assert [job.sampling.max_new_tokens for job in jobs] == [10, 10]
    assert completion_request({"prompt": "a", "max_tokens": 7}).jobs[0].sampling.max_new_tokens == 7


@pytest.mark.parametrize(
    ("said", "numbers"),
    [
        ({"max_tokens": 99}, (100, 101, 2, 99)),
        ({"input_ids": [1] * 100}, (100, 101, 100, 1)),
        ({"input_ids": [1] * 500, "max_completion_tokens": 3}, (100, 503, 500, 3)),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    said: dict[str, Any], numbers: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidField) as refused:
        chat(**said)
    error = error_of(refused.value)["error"]
    assert (error["code"], error["param"]) == (400, "max_tokens")
    limit, total, prompt, answer = numbers
    assert (
        f"this model's maximum context length is {limit} tokens. However, you requested {total} tokens "
        f"({prompt} in the prompt, {answer} in the completion)"
    ) in error["message"]


def test_ids_may_be_the_prompt_of_a_chat() -> None:
    request = chat_request({"input_ids": [5, 6], "tools": [TOOL]})  # as miles' agents send them, without messages
    (job,) = request.jobs
    assert job.token_ids is not None
    assert (job.token_ids.tolist(), job.messages, len(job.tools)) == ([5, 6], None, 1)
    both = job_of(input_ids=[5], messages=[USER])
    assert both.token_ids is not None
    assert both.token_ids.tolist() == [5]
    for wrong in ([], "ab", [1.0], [[1]]):
        with pytest.raises(InvalidField, match="input_ids="):
            chat(input_ids=wrong)
    with pytest.raises(InvalidField, match=r"input_ids=.*only in chat completions"):
        completion_request({"prompt": "a", "input_ids": [1]})
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(InvalidField, match=r"input_ids=.*absent beside media"):
        chat(input_ids=[1], messages=[{"role": "user", "content": [picture]}])


def test_templates_get_their_variables() -> None:
    job = job_of(chat_template_kwargs={"enable_thinking": False}, chat_template="{{ messages }}", tools=[TOOL])
    assert job.token_ids is not None
    assert VARIABLES["enable_thinking"] is False
    assert (VARIABLES["chat_template"], VARIABLES["answer"], len(VARIABLES["tools"])) == ("{{ messages }}", True, 1)
    for name in ("chat_template", "tokenize", "messages", "tools", "return_tensors"):
        with pytest.raises(InvalidField, match="chat_template_kwargs="):
            job_of(chat_template_kwargs={name: 1})
    with pytest.raises(InvalidField, match=r"enable_thinking=.*rendered by a worker"):
        chat_request({"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}})
    assert chat_request({"messages": [USER], "chat_template_kwargs": {}}).jobs[0].messages is not None


@pytest.mark.parametrize("error", [TemplateError("roles must alternate"), UndefinedError("no tools"), KeyError("x")])
def test_a_conversation_that_the_template_refuses_is_the_callers(error: Exception) -> None:
    def refuse(*_: Any, **__: Any) -> list[int]:
        raise error

    with pytest.raises(InvalidField, match=re.escape(f"messages=1: what the chat template renders: {error}")):
        chat_request({"messages": [USER]}, render=refuse, context_length=100)


def test_a_context_length_has_conversations_rendered_here_but_those_with_media() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    assert job_of().token_ids is not None
    job = job_of(messages=[{"role": "user", "content": [picture]}])
    assert (job.token_ids, len(job.media), job.sampling.max_new_tokens) == (None, 1, 128)


def test_tools_that_must_not_be_called_are_shown_all_the_same() -> None:
    """The next turn's prompt has them, so this one's must, to be its beginning."""
    request = chat(tools=[TOOL], tool_choice="none")
    assert [tool["function"]["name"] for tool in VARIABLES["tools"]] == ["add"]
    assert (request.jobs[0].tools, request.tools.parsed) == ((), False)
    assert chat(tools=[TOOL]).jobs[0].tools


def test_a_recorded_turn_has_logprobs_that_the_answer_does_not_show() -> None:
    for body, shown in (({}, False), ({"logprobs": True, "top_logprobs": 2}, True)):
        request = chat_request({"messages": [USER], **body}, record=True)
        assert (request.jobs[0].logprobs.sampled, request.logprobs) == (True, shown)
        assert request.jobs[0].logprobs.top == body.get("top_logprobs", 0)
    assert completion_request({"prompt": ["a", "b"]}, record=True).jobs[1].logprobs.sampled


def test_messages_may_be_what_a_client_has_from_a_stream() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [call], "provider": {"a": 1}, "reasoning": "r"}]
    messages = chat_request({"messages": said}).jobs[0].messages
    assert messages is not None
    assert [one.function.name for one in messages[1].tool_calls] == ["add"]


def test_every_parameter_of_openais_client_is_known() -> None:
    params = Lazily("openai.types.chat.completion_create_params").CompletionCreateParamsBase.__annotations__
    assert [name for name in params if name not in fields.KNOWN and name not in fields.RULES] == []


def nested(depth: int) -> Any:
    value: Any = {}
    for place in range(depth):
        value = [value] if place % 2 else {"a": value}
    return value


WRONG: list[Any] = [True, -1, 1 << 70, 1.5, float("nan"), "", "\ud800", [], [None], [{}], {"a": 1}, {"type": []}]
WRONG += [nested(900), {"role": []}, [{"role": {}}], [{"type": "function"}], {"function": {"name": []}}, [1 << 40]]


@pytest.mark.parametrize("name", sorted({*fields.KNOWN, *fields.RULES, *fields.NESTED}))
def test_whatever_a_field_is_only_typed_errors_come_of_it(name: str) -> None:
    base: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "input": "a"}
    for value in WRONG:
        with contextlib.suppress(InvalidField):
            chat(**base | {name: value})
        with contextlib.suppress(InvalidField):
            completion_request({"prompt": "a", name: value}, context_length=100, adapters={"a"})
        with contextlib.suppress(InvalidField):
            embedding_job(base | {name: value})


def test_what_is_nested_too_deep_is_refused() -> None:
    for name in ("response_format", "logit_bias", "custom_params"):
        with pytest.raises(InvalidField, match=f"{name}=.*nested at most 100 deep"):
            chat(**{name: nested(900)})
