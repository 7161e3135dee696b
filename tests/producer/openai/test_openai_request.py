"""Bodies of OpenAI's endpoints as jobs: what each field becomes, and what is refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.lazily import Lazily

from rolloutmq.messages import InvalidField, LogprobOptions
from rolloutmq.producer.openai import chat_request, completion_request, error_of, fields

USER = {"role": "user", "content": "hé"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}


def chat(**body: Any) -> Any:
    return chat_request({"model": "m", "messages": [USER], **body})


def test_a_chat_with_everything() -> None:
    request = chat(
        n=3,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        seed=5,
        presence_penalty=0.5,
        logit_bias={"7": -100},
        logprobs=True,
        top_logprobs=2,
        session_id="s",
        user="somebody",
        store=False,
        return_token_ids=True,
        return_weight_versions=True,
        priority="high",
        top_k=4,
    )
    (job,) = request.jobs
    assert job.messages is not None
    assert [(message.role, message.content) for message in job.messages] == [("user", "hé")]
    assert (job.n, job.seed, job.session_id, job.priority, job.stream) == (3, 5, "s", "high", False)
    sampling = job.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 4)
    assert (sampling.stop, sampling.presence_penalty, sampling.logit_bias) == (("a", "b"), 0.5, {7: -100.0})
    assert (job.logprobs.sampled, job.logprobs.top) == (True, 2)
    assert (request.model, request.logprobs, request.token_ids, request.versions) == ("m", True, True, True)


def test_only_what_is_asked_for_is_asked_for() -> None:
    request = chat()
    assert request.jobs[0].logprobs == LogprobOptions(sampled=False)
    assert not any((request.logprobs, request.token_ids, request.versions, request.stream, request.include_usage))


def test_defaults_hold_where_the_body_says_nothing() -> None:
    defaults = {"max_response_length": 9, "do_sample": False, "top_k": 5, "stop_strs": "a", "action_mask": [0, 1]}
    body = {"messages": [USER], "max_tokens": 4, "temperature": 1.0, "stop": "b", "disallowed_tokens": [1]}
    (job,) = chat_request(body, defaults).jobs
    sampling = job.sampling
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k, sampling.stop) == (4, 1.0, 5, ("b",))
    assert [one.name for one in job.logit_processors] == ["action_mask", "disallowed_tokens"]


@pytest.mark.parametrize(
    ("said", "regex"),
    [({}, "a+"), ({"response_format": {"type": "text"}}, None), ({"response_format": {"type": "json_object"}}, None)],
)
def test_a_default_grammar_gives_way_to_any_format(said: dict[str, Any], regex: str | None) -> None:
    assert chat_request({"messages": [USER], **said}, {"guided_regex": "a+"}).jobs[0].sampling.regex == regex


def test_a_system_and_a_developer_and_what_an_answer_had_beside() -> None:
    said = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        USER,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    messages = chat_request({"messages": said}).jobs[0].messages
    assert messages is not None
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2].tool_calls[0].function.name == "add"
    assert messages[3].tool_call_id == "c"


OF_CHATS: dict[str, Any] = {
    "messages": [USER],
    "audio": {"format": "wav", "voice": "alloy"},
    "function_call": "auto",
    "functions": [TOOL["function"]],
    "modalities": ["text", "audio"],
    "prediction": {"type": "content", "content": "a"},
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_logprobs": 1,
    "logprobs": True,
}
OF_COMPLETIONS: dict[str, Any] = {"prompt": "a", "logprobs": 1, "best_of": 1, "echo": True, "suffix": None}
OF_BOTH: dict[str, Any] = {"stop": ["a"], "logit_bias": {"5": 1}, "stream_options": {"include_usage": True}}
OF_BOTH |= {"metadata": {"a": "b"}, "web_search_options": {}, "parallel_tool_calls": True, "store": True}
TEXTS = {"model", "prompt_cache_key", "prompt_cache_retention", "reasoning_effort", "safety_identifier"}
TEXTS |= {"service_tier", "user", "verbosity"}


@pytest.mark.parametrize("chats", [True, False])
def test_every_field_of_openais_own_client_is_read(chats: bool) -> None:
    params = Lazily(f"openai.types.{'chat.' if chats else ''}completion_create_params")
    names = set(params.CompletionCreateParamsBase.__annotations__)
    special = OF_BOTH | (OF_CHATS if chats else OF_COMPLETIONS)
    body = {name: special.get(name, "a" if name in TEXTS else 1) for name in names} | {"stream": True}
    read = chat_request if chats else completion_request
    for older in (True, False) if chats else (True,):
        without = {"tools", "tool_choice", "parallel_tool_calls"} if older else {"functions", "function_call"}
        request = read({name: value for name, value in body.items() if name not in without})
        assert (request.logprobs, request.stops, request.include_usage) == (True, ("a",), True)
        assert [tool.function.name for tool in request.tools.declared] == (["add"] if chats else [])
        assert request.tools.legacy == (chats and older)


def test_a_field_without_effect_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields.logged.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            chat(verbosity="low", modalities=["text"], echo=False)
    assert [record.getMessage() for record in caplog.records] == [
        "verbosity in a request's body is ignored: the model's answers are as long as it makes them"
    ]


def test_functions_are_tools_of_one_call() -> None:
    function, other = TOOL["function"], OTHER["function"]
    request = chat(functions=[function, other])
    assert [tool.function.name for tool in request.jobs[0].tools] == ["add", "other"]
    assert (request.tools.legacy, request.tools.one) == (True, True)
    assert not chat(functions=[function], function_call="none").tools.parsed
    named = chat(functions=[function, other], function_call={"name": "other"}).jobs[0]
    schema = json.loads(named.sampling.json_schema or "")
    assert schema["items"]["properties"]["name"]["enum"] == ["other"]
    said = [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    messages = chat_request({"messages": said}).jobs[0].messages
    assert messages is not None
    assert [(message.role, message.name) for message in messages[1:]] == [("assistant", None), ("tool", "add")]
    assert messages[1].tool_calls[0].function.name == "add"


def test_a_stop_is_not_shown_unless_the_body_says_so() -> None:
    assert chat(stop="a").stops == ("a",)
    for name in ("include_stop_str_in_output", "no_stop_trim", "include_stop"):
        assert chat(stop="a", **{name: True}).stops == ()
    assert chat(stop="a", include_stop=False).stops == ()  # the worker removes it, with its tokens
    assert chat_request({"messages": [USER], "stop": "a"}, {"include_stop": True}).stops == ()


ARRAY = {"type": "array"}


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": ARRAY}}, ARRAY),
    ],
)
def test_response_formats(given: dict[str, Any], schema: dict[str, Any] | None) -> None:
    found = chat(response_format=given).jobs[0].sampling.json_schema
    assert (json.loads(found) if found is not None else None) == schema


def test_tools_by_choice() -> None:
    auto = chat(tools=[TOOL, OTHER])
    assert [tool.function.name for tool in auto.jobs[0].tools] == ["add", "other"]
    assert auto.jobs[0].sampling.json_schema is None
    none = chat(tools=[TOOL], tool_choice="none")
    assert ([tool.function.name for tool in none.jobs[0].tools], none.tools.parsed) == (["add"], False)

    required = chat(tools=[TOOL, OTHER], tool_choice="required", max_tokens=5).jobs[0]
    schema = json.loads(required.sampling.json_schema or "")
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    names = [call["properties"]["name"]["enum"] for call in schema["items"]["anyOf"]]
    assert names == [["add"], ["other"]]
    assert required.sampling.max_new_tokens == 5

    named = chat(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "add"}}).jobs[0]
    schema = json.loads(named.sampling.json_schema or "")
    assert (schema["maxItems"], schema["items"]["properties"]["parameters"]) == (1, TOOL["function"]["parameters"])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hé", [("text", "hé")]),
        (["a", "b"], [("text", "a"), ("text", "b")]),
        ([1, 2], [("token_ids", [1, 2])]),
        ([[1, 2], [3]], [("token_ids", [1, 2]), ("token_ids", [3])]),
    ],
)
def test_prompts_of_a_completion(prompt: Any, expected: list[tuple[str, Any]]) -> None:
    jobs = completion_request({"prompt": prompt, "n": 2, "logprobs": 1, "session_id": 5}).jobs
    for job, (form, value) in zip(jobs, expected, strict=True):
        given = getattr(job, form)
        assert (given.tolist() if form == "token_ids" else given) == value
        assert (job.n, job.session_id, job.logprobs.sampled, job.logprobs.top) == (2, "5", True, 1)


def test_a_completion_with_sessions_of_their_own() -> None:
    jobs = completion_request({"prompt": ["a", "b"], "session_id": ["x", "y"]}).jobs
    assert [job.session_id for job in jobs] == ["x", "y"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hé"}, "messages"),
        ({"messages": ["hé"]}, "messages[0]"),
        ({"messages": [USER, {"role": "wizard", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"functions": [TOOL["function"]], "tools": [TOOL]}, "functions"),
        ({"functions": [{}]}, "functions[0].function.name"),
        ({"functions": [TOOL["function"]], "function_call": {"name": "nobody"}}, "function_call"),
        ({"functions": [TOOL["function"]], "function_call": "required"}, "function_call"),
        ({"function_call": "auto"}, "function_call"),
        ({"temperatur": 1}, "temperatur"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "no"}}, "include_usage"),
        ({"n": True}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"session_id": ["a"]}, "session_id"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages.0.content.0"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        chat(**body)
    assert caught.value.field == field
    told = error_of(caught.value)["error"]
    assert (told["code"], told["param"], told["type"]) == (400, field, "invalid_request_error")
    assert field in told["message"]


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [1, "a"], {"a": 1}, [[1], "b"]])
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(InvalidField, match="prompt="):
        completion_request({"prompt": prompt})


def test_what_only_a_chat_has() -> None:
    with pytest.raises(InvalidField, match="tools="):
        completion_request({"prompt": "a", "tools": [TOOL]})
