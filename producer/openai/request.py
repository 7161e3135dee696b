"""Makes jobs from bodies of OpenAI's chat completions and completions."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...messages.errors import InvalidField
from ...messages.model import ChatMessage, GenerateJob, SamplingParams
from ..data import from_openai
from .fields import Kind, fields_of, log_once, model_of, switch
from .tools import Tools, read_tools

Render = Callable[..., Sequence[int]]
"""render(messages, answer=True, **options of transformers' apply_chat_template) -> ids.

Among the options is the body's `chat_template`: a program. Whoever does not trust the caller refuses it.
"""
ROLES = ("developer", "system", "user", "assistant", "tool", "function")
_OF_CHATS = (
    *("tools", "tool_choice", "functions", "function_call", "continue_final_message", "add_generation_prompt"),
    *("chat_template", "chat_template_kwargs", "input_ids"),
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request body. jobs: one per prompt, all with the same n. The answer's choices are their samples in order.

    What the answer has, as the body asks for it:
    logprobs: log-probabilities. ids_as_tokens (return_tokens_as_token_ids): their tokens are "token_id:<id>".
    token_ids (return_token_ids): ids of prompt and answer, at the top and in the choices, in every reader's words.
    prompt_ids (return_prompt_token_ids): the prompt's, in the choices. meta_info (return_meta_info): SGLang's.
    versions (return_weight_versions): which version sampled each token. The oldest and the newest are in every answer.
    stops: the stop texts that answers do not show. Empty if the body says include_stop_str_in_output or a synonym.
    abort: the finish_reason of a sample that was ended early. OpenAI's types have no "abort", so strict clients refuse
        it; `stop_reason` says it instead.
    """

    kind: Kind
    jobs: tuple[GenerateJob, ...]
    model: str
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    ids_as_tokens: bool = False
    token_ids: bool = False
    prompt_ids: bool = False
    meta_info: bool = False
    versions: bool = False
    stops: tuple[str, ...] = ()
    tools: Tools = field(default_factory=Tools)
    abort: str = "length"


def chat_request(
    body: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    render: Render | None = None,
    always_render: bool = False,
    *,
    context_length: int | None = None,
    adapters: Container[str] = (),
    record: bool = False,
) -> Request:
    """Read a body of POST /v1/chat/completions.

    defaults: sampling parameters that the body may leave out. Beside OpenAI's fields the body may have other
    sampling parameters of any dialect, `input_ids` (the prompt, instead of messages), `session_id`, `lora`,
    `weight_version` ({"min_version", "exact_version"}), and a job's priority, deadline_s, min_version, exact_version,
    max_staleness. A number as priority is vLLM's: the lowest goes first. An unknown name is ignored, and logged once,
    unless it is close to a known one. Raises InvalidField, which names the field.

    render: makes the prompt's ids here instead of on the worker. `continue_final_message`, `chat_template_kwargs`,
        `chat_template` and `add_generation_prompt: false` need it. always_render: use it for every body.
    context_length: what the pool's engines take, prompt and answer together. With it, `render` is used for every
        conversation without media, a body without max_tokens gets the rest of the context, and one that asks for more
        is refused in OpenAI's words. Without it such a body gets a job's own default, and a worker refuses.
    adapters: the names of LoRA adapters that `model` may be, or may have behind a colon.
    record: ask the engine for log-probabilities even if the body does not. The answer does not show them then.
    """
    tools = read_tools(body)
    prompt, shown = _chat_prompt(body, tools, render, always_render or context_length is not None, always_render)
    room = _room(prompt, context_length)
    fields = fields_of(body, "chat", defaults, room=room, adapters=adapters) | (tools.job_fields() if shown else {})
    if tools.schema is not None:
        sampling = fields.get("sampling") or SamplingParams()
        if sampling.json_schema or sampling.regex or sampling.ebnf:
            raise InvalidField(
                "tool_choice", body.get("tool_choice"), "'auto' together with a response_format or grammar"
            )
        fields["sampling"] = sampling.model_copy(update={"json_schema": tools.schema})
    job = GenerateJob.build(**prompt, **fields, **_session(body.get("session_id")))
    return _request("chat", [job], body, tools, limit=context_length, record=record)


def completion_request(
    body: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    context_length: int | None = None,
    adapters: Container[str] = (),
    record: bool = False,
) -> Request:
    """Read a body of POST /v1/completions. The prompt is a text, ids, or a list of texts or of lists of ids.

    Without max_tokens 16 tokens are generated, as at OpenAI. See `chat_request` for the rest.
    """
    prompts = prompts_of("prompt", body.get("prompt"))
    for name in _OF_CHATS:
        if body.get(name) is not None:
            raise InvalidField(name, body[name], "only in chat completions")
    rooms = [room for prompt in prompts if (room := _room(prompt, context_length)) is not None]
    fields = fields_of(body, "completion", defaults, room=min(rooms, default=None), adapters=adapters)
    session = body.get("session_id")
    sessions = session if isinstance(session, list | tuple) else [session] * len(prompts)
    if len(sessions) != len(prompts):
        raise InvalidField("session_id", session, f"one, or a list of {len(prompts)}")
    jobs = [
        GenerateJob.build(**prompt, **fields, **_session(one)) for prompt, one in zip(prompts, sessions, strict=True)
    ]
    return _request("completion", jobs, body, Tools(), limit=context_length, record=record)


def _request(
    kind: Kind, jobs: Sequence[GenerateJob], body: Mapping[str, Any], tools: Tools, *, limit: int | None, record: bool
) -> Request:
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise InvalidField("stream_options", options, "an object")
    if body.get("stream_options") is not None and not body.get("stream"):
        raise InvalidField("stream_options", options, "only together with stream")
    if body.get("stream") and body.get("return_meta_info"):
        raise InvalidField("return_meta_info", True, "only without stream, as at SGLang")
    sampling, logprobs = jobs[0].sampling, jobs[0].logprobs
    for job in jobs:
        _check_room(job, limit)
    if record and not logprobs.sampled:
        recorded = {"logprobs": logprobs.model_copy(update={"sampled": True})}
        jobs = [job.model_copy(update=recorded) for job in jobs]
    return Request(
        kind,
        tuple(jobs),
        model_of(body),
        stream=switch(body, "stream"),
        include_usage=switch(options, "include_usage"),
        logprobs=logprobs.sampled,
        ids_as_tokens=switch(body, "return_tokens_as_token_ids"),
        token_ids=switch(body, "return_token_ids"),
        prompt_ids=switch(body, "return_prompt_token_ids"),
        meta_info=switch(body, "return_meta_info"),
        versions=switch(body, "return_weight_versions"),
        stops=() if "include_stop" in sampling.model_fields_set else sampling.stop,
        tools=tools,
    )


def _room(prompt: Mapping[str, Any], context_length: int | None) -> int | None:
    ids = prompt.get("token_ids")
    return context_length - len(ids) if context_length is not None and ids is not None else None


def _check_room(job: GenerateJob, limit: int | None) -> None:
    """Raises InvalidField in the words by which clients tell a prompt that is too long (NeMo-Gym, verifiers)."""
    most = job.sampling.max_new_tokens
    if limit is not None and job.token_ids is not None and most > limit - job.token_ids.size:
        size = job.token_ids.size
        raise InvalidField(
            "max_tokens",
            most,
            f"this model's maximum context length is {limit} tokens. However, you requested {size + most} tokens "
            f"({size} in the prompt, {most} in the completion)",
        )


def _chat_prompt(
    body: Mapping[str, Any], tools: Tools, render: Render | None, wanted: bool, needed: bool
) -> tuple[dict[str, Any], bool]:
    """The prompt as fields of a job, and whether the worker has to see the tools, to show them or to find calls.

    wanted: make ids of it here where that is possible. needed: it must be.
    """
    given = body.get("input_ids")
    messages, media = _messages(body.get("messages")) if given is None or body.get("messages") else ((), {})
    if given is not None:
        if not is_ids(given):
            raise InvalidField("input_ids", given, "a list of token ids, at least one")
        if media:
            raise InvalidField("input_ids", given, "absent beside media: their places are in messages")
        return {"token_ids": given}, tools.parsed
    how = _rendering(body)
    if how or needed or (wanted and not media and render is not None):
        if render is None or media:
            why = "absent: the conversation is rendered by a worker" if render is None else "absent beside media"
            raise InvalidField(next(iter(how), "messages"), True, why)
        shown = {"tools": [tool.rendered() for tool in tools.declared]} if tools.declared else {}
        try:
            ids = render([message.rendered() for message in messages], **{"answer": True} | how, **shown)
        except Exception as error:  # a template is a program, and refuses conversations by raising anything
            raise InvalidField("messages", len(messages), f"what the chat template renders: {error}") from error
        return {"token_ids": ids}, tools.parsed
    return {"messages": messages, **media}, True


_TAKEN = frozenset(
    {"messages", "answer", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"}
    | {"continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
    | {"return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""What `apply_chat_template` takes beside a template's own variables."""


def _rendering(body: Mapping[str, Any]) -> dict[str, Any]:
    """How the conversation is rendered, as arguments of Render. Empty if as the worker does it."""
    continues = switch(body, "continue_final_message")
    answer = switch({"add_generation_prompt": not continues} | _given(body), "add_generation_prompt")
    if continues and answer:
        raise InvalidField("add_generation_prompt", True, "false together with continue_final_message")
    how: dict[str, Any] = {} if answer else {"answer": False}
    if continues:
        how["continue_final_message"] = True
    if (template := body.get("chat_template")) is not None:
        if not isinstance(template, str):
            raise InvalidField("chat_template", template, "a text")
        how["chat_template"] = template
    variables = body.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping) or _TAKEN & variables.keys():
        raise InvalidField("chat_template_kwargs", variables, f"an object, without {', '.join(sorted(_TAKEN))}")
    return how | dict(variables)


def _given(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _session(session: Any) -> dict[str, Any]:
    if session is None:
        return {}
    if isinstance(session, bool) or not isinstance(session, str | int) or not str(session):
        raise InvalidField("session_id", session, "a text or a number")
    return {"session_id": str(session)}


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
    plain = {name: value for name, value in message.items() if value is not None and name in _OF_MESSAGES}
    for name in message.keys() - _OF_MESSAGES - _ECHOED:
        log_once(f"messages.{name}", "no chat template is shown it")
    plain["role"] = _PRESENT.get(plain["role"], plain["role"])
    if (call := message.get("function_call")) is not None and "tool_calls" not in plain:
        plain["tool_calls"] = [{"type": "function", "function": call}]
    if isinstance(calls := plain.get("tool_calls"), list | tuple):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    """Without the `index` that calls have in a stream."""
    return {name: value for name, value in call.items() if name != "index"} if isinstance(call, Mapping) else call


_PRESENT = {"developer": "system", "function": "tool"}
_OF_MESSAGES = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
_ECHOED = frozenset(
    {"refusal", "annotations", "audio", "token_ids", "reasoning_content", "reasoning", "function_call"}
    | {"prompt_token_ids", "generation_token_ids", "generation_log_probs"}
)


def is_ids(value: Any) -> bool:
    """Whether it is a list of token ids, at least one."""
    return (
        isinstance(value, list | tuple)
        and all(type(it) is int and 0 <= it < 1 << 31 for it in value)
        and len(value) > 0
    )


def prompts_of(name: str, raw: Any) -> list[dict[str, Any]]:
    """A text, ids, or a list of either, as prompts of jobs. Raises InvalidField, which names the field."""
    if isinstance(raw, str) and raw:
        return [{"text": raw}]
    if is_ids(raw):
        return [{"token_ids": raw}]
    if isinstance(raw, list | tuple) and raw and all(isinstance(one, str) and one for one in raw):
        return [{"text": one} for one in raw]
    if isinstance(raw, list | tuple) and raw and all(is_ids(one) for one in raw):
        return [{"token_ids": one} for one in raw]
    raise InvalidField(name, raw, "a text, a list of token ids, or a list of texts or of lists of ids; none empty")
