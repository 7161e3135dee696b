"""Makes jobs from bodies of OpenAI's chat completions and completions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from ...messages.dialects import collect, job_fields
from ...messages.errors import InvalidField
from ...messages.model import GRAMMARS, ChatMessage, GenerateJob, LogprobOptions, SamplingParams
from ..data import from_openai
from .tools import Tools, read_tools

log = logging.getLogger(__name__)
Kind = Literal["chat", "completion"]
Render = Callable[..., Sequence[int]]
"""render(messages, answer=True, **options of transformers' apply_chat_template) -> ids."""
IGNORED = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
)
"""Fields that only OpenAI's own service uses. They are ignored: the answer does not depend on them."""
WITHOUT_EFFECT = {
    "reasoning_effort": "the model reasons as its chat template has it",
    "verbosity": "the model's answers are as long as it makes them",
    "modalities": "answers are text",
    "audio": "answers are text",
    "web_search_options": "nothing searches the web here",
    "echo": "an answer does not repeat its prompt",
}
"""Fields that would change the answer of OpenAI's service, and why they change nothing here. They are logged once."""
ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_OURS = frozenset(
    {"model", "messages", "prompt", "stream", "stream_options", "tools", "tool_choice", "session_id"}
    | {"functions", "function_call", "continue_final_message", "add_generation_prompt"}
)
_OF_CHATS = ("tools", "tool_choice", "functions", "function_call", "continue_final_message", "add_generation_prompt")
_SWITCHES = ("return_token_ids", "return_weight_versions")
_FIELDS = ("priority", "deadline_s", "min_version", "exact_version", "max_staleness", "trace_id", "tool_parser")
MAX_TOP = {"chat": 20, "completion": 5}


@dataclass(frozen=True, slots=True)
class Request:
    """One request body. jobs: one per prompt, all with the same n. The answer's choices are their samples in order.

    logprobs, token_ids, versions: whether the answer has them. The body's return_token_ids and return_weight_versions
    ask for the last two.
    stops: the stop texts that answers do not show. Empty if the body says include_stop_str_in_output or a synonym.
    """

    kind: Kind
    jobs: tuple[GenerateJob, ...]
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    versions: bool = False
    stops: tuple[str, ...] = ()
    tools: Tools = field(default_factory=Tools)


def chat_request(
    body: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    render: Render | None = None,
    always_render: bool = False,
) -> Request:
    """Read a body of POST /v1/chat/completions.

    defaults: sampling parameters that the body may leave out. Beside OpenAI's fields the body may have other
    sampling parameters of any dialect, `session_id`, `return_token_ids`, `return_weight_versions`, `lora`, and a job's
    priority, deadline_s, min_version, exact_version, max_staleness. Raises InvalidField, which names the field.

    render: makes the prompt's ids here instead of on the worker. `continue_final_message` and
        `add_generation_prompt: false` (vLLM's fields) need it. always_render: use it for every body.
    """
    messages, media = _messages(body.get("messages"))
    tools = read_tools(body)
    fields = _fields(body, "chat", defaults) | tools.job_fields()
    if tools.schema is not None:
        sampling = fields.get("sampling") or SamplingParams()
        if sampling.json_schema or sampling.regex or sampling.ebnf:
            raise InvalidField(
                "tool_choice", body.get("tool_choice"), "'auto' together with a response_format or grammar"
            )
        fields["sampling"] = sampling.model_copy(update={"json_schema": tools.schema})
    session = body.get("session_id")
    prompt: dict[str, Any] = {"messages": messages, **media}
    if (how := _rendering(body)) or always_render:
        if render is None or media:
            why = "absent: the conversation is rendered by a worker" if render is None else "absent beside media"
            raise InvalidField(next(iter(how), "messages"), True, why)
        shown = {"tools": [tool.rendered() for tool in tools.declared]} if tools.declared else {}
        prompt = {"token_ids": render([message.rendered() for message in messages], **how, **shown)}
    job = GenerateJob.build(**prompt, **fields, **_session(session))
    return _request("chat", [job], body, tools)


def completion_request(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Request:
    """Read a body of POST /v1/completions. The prompt is a text, ids, or a list of texts or of lists of ids.

    See `chat_request` for the rest.
    """
    prompts = _prompts(body.get("prompt"))
    for name in _OF_CHATS:
        if body.get(name) is not None:
            raise InvalidField(name, body[name], "only in chat completions")
    fields = _fields(body, "completion", defaults)
    session = body.get("session_id")
    sessions = session if isinstance(session, list | tuple) else [session] * len(prompts)
    if len(sessions) != len(prompts):
        raise InvalidField("session_id", session, f"one, or a list of {len(prompts)}")
    jobs = [
        GenerateJob.build(**prompt, **fields, **_session(one)) for prompt, one in zip(prompts, sessions, strict=True)
    ]
    return _request("completion", jobs, body, Tools())


def _request(kind: Kind, jobs: Sequence[GenerateJob], body: Mapping[str, Any], tools: Tools) -> Request:
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidField("stream_options", options, "an object")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidField("stream_options", options, "only together with stream")
    sampling = jobs[0].sampling
    return Request(
        kind,
        tuple(jobs),
        str(body.get("model") or ""),
        stream=_switch(body, "stream"),
        include_usage=_switch(options, "include_usage"),
        logprobs=jobs[0].logprobs.sampled,
        token_ids=_switch(body, "return_token_ids"),
        versions=_switch(body, "return_weight_versions"),
        stops=() if "include_stop" in sampling.model_fields_set else sampling.stop,
        tools=tools,
    )


def _fields(body: Mapping[str, Any], kind: Kind, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """The job's fields apart from its prompt: sampling parameters in any dialect, and fields of GenerateJob."""
    skip = _OURS | IGNORED | WITHOUT_EFFECT.keys() | {*_SWITCHES, *_FIELDS, "parallel_tool_calls"}
    said = {name: value for name, value in body.items() if name not in skip and value is not None}
    for name in WITHOUT_EFFECT.keys() & {name for name, value in body.items() if value not in _QUIET}:
        _log_ignored(name)
    logprobs, top = said.get("logprobs"), said.get("top_logprobs")
    if kind == "chat" and logprobs is not None and not isinstance(logprobs, bool):
        raise InvalidField("logprobs", logprobs, "true or false; how many is said by top_logprobs")
    if kind == "chat" and top and not logprobs:
        raise InvalidField("top_logprobs", top, "only together with logprobs=true")
    many = top if kind == "chat" else logprobs
    if isinstance(many, int) and not isinstance(many, bool) and not 0 <= many <= MAX_TOP[kind]:
        raise InvalidField("top_logprobs" if kind == "chat" else "logprobs", many, f"from 0 to {MAX_TOP[kind]}")
    taken = _subjects(said)
    quiet = {name: value for name, value in (defaults or {}).items() if not taken & _subjects({name: value})}
    fields = job_fields({**quiet, **said}, "openai")
    fields.pop("stream", None)
    if logprobs is None or logprobs is False:
        fields["logprobs"] = LogprobOptions(sampled=False)
    if _switch(body, "stream"):
        fields["stream"] = True
    for name in _FIELDS:
        if body.get(name) is not None:
            fields[name] = body[name]
    return fields


_QUIET: tuple[Any, ...] = (None, False, ["text"])
"""Values of fields without effect that ask for nothing else than what is done here."""


@cache
def _log_ignored(name: str) -> None:
    log.warning("%s in a request's body is ignored: %s", name, WITHOUT_EFFECT[name])


_SUBJECTS = {f"sampling.{name}": "grammar" for name in GRAMMARS} | {"logprobs.top": "logprobs.sampled"}


def _subjects(params: Mapping[str, Any]) -> set[str]:
    """What parameters are about: a default gives way to what the body says about the same, by whatever name."""
    found = {_SUBJECTS.get(path, path) for path in collect(params, "openai").fields}
    return (found | {"grammar"} if "response_format" in params else found) - {"logit_processors"}


def _rendering(body: Mapping[str, Any]) -> dict[str, Any]:
    """How the conversation ends, as arguments of Render. Empty if with the template's start of an answer."""
    continues = _switch(body, "continue_final_message")
    answer = _switch({"add_generation_prompt": not continues} | _given(body), "add_generation_prompt")
    if continues and answer:
        raise InvalidField("add_generation_prompt", True, "false together with continue_final_message")
    return {} if answer else {"answer": False} | ({"continue_final_message": True} if continues else {})


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _session(session: Any) -> dict[str, Any]:
    if session is None:
        return {}
    if isinstance(session, bool) or not isinstance(session, str | int) or not str(session):
        raise InvalidField("session_id", session, "a text or a number")
    return {"session_id": str(session)}


def _switch(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(name, value, "true or false")
    return bool(value)


def _messages(raw: Any) -> tuple[tuple[ChatMessage, ...], dict[str, Any]]:
    """The conversation, and the job's field `media` if it has any."""
    if not isinstance(raw, list | tuple) or not raw:
        raise InvalidField("messages", raw, "a list of messages, at least one")
    for place, message in enumerate(raw):
        if not isinstance(message, Mapping):
            raise InvalidField(f"messages[{place}]", message, "an object with role and content")
        if message.get("role") not in ROLES:
            raise InvalidField(f"messages[{place}].role", message.get("role"), f"one of {', '.join(ROLES)}")
    messages, media = from_openai([_plain(message) for message in raw])
    return tuple(messages), {"media": tuple(media)} if media else {}


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without fields of earlier answers that no chat template shows, and in the present form.

    Role developer becomes system. A function's call and its answer become a tool's.
    """
    plain = {name: value for name, value in message.items() if value is not None and name not in _ECHOED}
    plain["role"] = _PRESENT.get(plain["role"], plain["role"])
    if (call := plain.pop("function_call", None)) is not None and "tool_calls" not in plain:
        plain["tool_calls"] = [{"type": "function", "function": call}]
    return plain


_PRESENT = {"developer": "system", "function": "tool"}
_ECHOED = frozenset({"refusal", "annotations", "audio", "token_ids", "reasoning_content", "reasoning"})


def _prompts(raw: Any) -> list[dict[str, Any]]:
    def is_ids(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(type(token) is int for token in value) and len(value) > 0

    if isinstance(raw, str) and raw:
        return [{"text": raw}]
    if is_ids(raw):
        return [{"token_ids": raw}]
    if isinstance(raw, list | tuple) and raw and all(isinstance(one, str) and one for one in raw):
        return [{"text": one} for one in raw]
    if isinstance(raw, list | tuple) and raw and all(is_ids(one) for one in raw):
        return [{"token_ids": one} for one in raw]
    raise InvalidField("prompt", raw, "a text, a list of token ids, or a list of texts or of lists of ids; none empty")
