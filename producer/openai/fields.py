"""The fields of a job that a body says apart from the prompt: in whose words, and what becomes of the others."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal

from ...messages.dialects import NESTED, RULES, collect, job_fields
from ...messages.errors import InvalidField, shortly
from ...messages.model import GRAMMARS, LogprobOptions

log = logging.getLogger(__name__)
Kind = Literal["chat", "completion"]
IGNORED = frozenset(
    {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prediction", "request_id", "rid", "enqueue", "routing_key", "cache_salt", "extra_key", "custom_labels"}
    | {"add_special_tokens", "kv_transfer_params", "return_token_strs", "extra_body"}
)
"""Fields that only OpenAI's own service uses, those that whoever does the HTTP reads, and those of other servers on
which an answer does not depend here."""
WITHOUT_EFFECT = {
    "reasoning_effort": "the model reasons as its chat template has it",
    "verbosity": "the model's answers are as long as it makes them",
    "modalities": "answers are text",
    "audio": "answers are text",
    "web_search_options": "nothing searches the web here",
    "echo": "an answer does not repeat its prompt",
}
"""Fields that would change the answer of OpenAI's service, and why they change nothing here. They are logged once."""
_QUEUE = ("priority", "deadline_s", "min_version", "exact_version", "max_staleness", "trace_id")
_OURS = frozenset(
    {"model", "messages", "prompt", "input_ids", "stream", "stream_options", "tools", "tool_choice", "session_id"}
    | {"functions", "function_call", "parallel_tool_calls", "continue_final_message", "add_generation_prompt"}
    | {"chat_template", "chat_template_kwargs", "timeout", "weight_version", "tool_parser"}
    | {"return_weight_versions", "return_token_ids", "return_prompt_token_ids", "return_tokens_as_token_ids"}
    | {"return_meta_info", *_QUEUE}
)
KNOWN = _OURS | IGNORED | WITHOUT_EFFECT.keys()
"""Fields that are no sampling parameters of `messages.dialects`."""
MAX_TOP = 20
MAX_UNKNOWN = 64
"""The most unknown names in one body, and the longest that may be a misspelt one."""
MAX_DEPTH = 100
COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for a completion."""
REST_TOKENS = 1 << 17
"""The most tokens of an answer to a chat that says no number, however long the context."""


def fields_of(
    body: Mapping[str, Any],
    kind: Kind,
    defaults: Mapping[str, Any] | None = None,
    *,
    room: int | None = None,
    adapters: Container[str] = (),
) -> dict[str, Any]:
    """The job's fields apart from its prompt: sampling parameters in any dialect, and fields of GenerateJob.

    room: how many tokens fit behind the prompt, None if that is not known. adapters: see `chat_request`.
    """
    said = _said(body)
    _check_logprobs(said, kind)
    taken = _subjects(said)
    about = {name: _subjects({name: value}) for name, value in (defaults or {}).items()}
    params = {name: value for name, value in (defaults or {}).items() if not taken & about[name]} | said
    most = COMPLETION_TOKENS if kind == "completion" else REST_TOKENS if room is not None else None
    if most is not None and "sampling.max_new_tokens" not in taken.union(*about.values()):
        params["max_new_tokens"] = max(1, most if room is None else min(most, room))
    fields = job_fields(params, "openai")
    if said.get("logprobs") is None or said["logprobs"] is False:
        fields["logprobs"] = fields.get("logprobs", LogprobOptions()).model_copy(update={"sampled": False})
    fields.pop("stream", None)
    if switch(body, "stream"):
        fields["stream"] = True
    if body.get("tool_parser") is not None:
        fields["tool_parser"] = body["tool_parser"]
    if (adapter := _adapter(model_of(body), adapters)) is not None and "lora" not in taken:
        fields["lora"] = adapter
    return fields | queue_fields(body)


def queue_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of any job that say when it runs: its priority, deadline and weights versions."""
    fields = {"deadline_s": body["timeout"]} if body.get("timeout") is not None else {}
    fields |= {name: body[name] for name in _QUEUE if body.get(name) is not None}
    if type(priority := body.get("priority")) is int:  # vLLM's servers take the lowest number first
        fields["priority"] = "high" if priority < 0 else "low" if priority > 0 else "normal"
    wanted, names = body.get("weight_version"), ("exact_version", "min_version")
    if wanted is None:
        return fields
    if not isinstance(wanted, Mapping) or not wanted.keys() <= {*names}:
        raise InvalidField("weight_version", wanted, f"an object with {' or '.join(names)}, numbers")
    return fields | next(({name: wanted[name]} for name in names if wanted.get(name) is not None), {})


def switch(body: Mapping[str, Any], name: str) -> bool:
    """True if the body says so, False if it says nothing. Raises InvalidField."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidField(name, value, "true or false")
    return bool(value)


def _said(body: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters among the body's fields, in the words of `job_fields`."""
    given = {str(name): value for name, value in body.items() if value is not None}
    for name in WITHOUT_EFFECT.keys() & {name for name, value in given.items() if value not in _QUIET}:
        log_once(name, WITHOUT_EFFECT[name])
    unknown = [name for name in given if name not in KNOWN and name not in RULES and name not in NESTED]
    if len(unknown) > MAX_UNKNOWN:
        raise InvalidField("body", f"{len(unknown)} unknown fields", f"at most {MAX_UNKNOWN}")
    for name in unknown:
        if meant := misspelt(name):
            raise InvalidField(name, given[name], f"there is no such field: did you mean {meant}?")
        log_once(name, "it is not known here")
    said = {name: value for name, value in given.items() if name in NESTED or name in RULES}
    said = {name: value for name, value in said.items() if name not in KNOWN}
    for name, value in said.items():
        if _deeper(value, MAX_DEPTH):
            raise InvalidField(name, value, f"nested at most {MAX_DEPTH} deep")
    if type(seed := said.get("seed")) is int and seed != -1:
        said["seed"] = seed % (1 << 63)
    return said


_QUIET: tuple[Any, ...] = (False, ["text"])
"""Values of fields without effect that ask for nothing else than what is done here."""
_NAMES = sorted({name for name, rule in RULES.items() if rule.read or rule.refuse} | _OURS)


def _deeper(value: Any, depth: int) -> bool:
    """Whether a value is nested deeper. What writes it down later would overflow Python's stack."""
    level = [value]
    while level and depth >= 0:
        inside = (one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list))
        level, depth = [part for parts in inside for part in parts], depth - 1
    return bool(level)


@lru_cache(1024)
def misspelt(name: str) -> str:
    """The field that was meant. "" if the name is like none, so that it is somebody else's."""
    found = get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.8) if len(name) <= MAX_UNKNOWN else []
    return found[0] if found else ""


logged: set[str] = set()
"""The names that were logged."""


def log_once(name: str, why: str) -> None:
    """Say that a field is ignored. Only so many names are ever said, because callers make them up."""
    if name not in logged and len(logged) < 256:
        logged.add(name)
        log.warning("%s in a request's body is ignored: %s", shortly(name)[1:-1], why)


def _check_logprobs(said: Mapping[str, Any], kind: Kind) -> None:
    logprobs, top = said.get("logprobs"), said.get("top_logprobs")
    if kind == "chat" and logprobs is not None and not isinstance(logprobs, bool):
        raise InvalidField("logprobs", logprobs, "true or false; how many is said by top_logprobs")
    if kind == "chat" and top and not logprobs:
        raise InvalidField("top_logprobs", top, "only together with logprobs=true")
    many = top if kind == "chat" else logprobs
    if type(many) is int and not 0 <= many <= MAX_TOP:
        raise InvalidField("top_logprobs" if kind == "chat" else "logprobs", many, f"from 0 to {MAX_TOP}")


_SUBJECTS = {f"sampling.{name}": "grammar" for name in GRAMMARS} | {"logprobs.top": "logprobs.sampled"}


def _subjects(params: Mapping[str, Any]) -> set[str]:
    """What parameters are about: a default gives way to what the body says about the same, by whatever name."""
    found = {_SUBJECTS.get(path, path) for path in collect(params, "openai").fields}
    return (found | {"grammar"} if "response_format" in params else found) - {"logit_processors"}


def model_of(body: Mapping[str, Any]) -> str:
    """The model's name, "" without one. Raises InvalidField."""
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidField("model", model, "a text")
    return model or ""


def _adapter(model: str, adapters: Container[str]) -> str | None:
    """The adapter that a model's name means: "<adapter>", or "<base>:<adapter>" as SGLang writes it."""
    return next((name for name in (model, model.rpartition(":")[2]) if name in adapters), None)
