"""Readers that turn the values of other engines' sampling parameters into fields of a GenerateJob.

Every reader gets the value of one name and returns {field: value}, with the field names of GenerateJob. It raises
ValueError, which says what is allowed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..model import PRIORITIES, LogprobOptions

Fields = dict[str, Any]
Reader = Callable[[Any], Fields]
SGLANG_TOP_K_ALL = 1 << 30
"""SGLang's own value for the whole vocabulary."""


def to(field: str) -> Reader:
    """The same value under another name."""
    return lambda value: {field: value}


def switch(field: str) -> Reader:
    """A switch."""
    return lambda value: {field: _switch(value)}


def top_k(value: Any) -> Fields:
    """-1, 0 and SGLang's 2**30 all mean the whole vocabulary."""
    if isinstance(value, bool):
        raise ValueError("a count, or -1 for the whole vocabulary")
    return {"sampling.top_k": -1 if value in (-1, 0, SGLANG_TOP_K_ALL) else value}


def seed(value: Any) -> Fields:
    """-1 means no seed in vLLM."""
    return {} if value == -1 else {"seed": value}


def texts(field: str) -> Reader:
    """One text or several. Empty texts are left out."""

    def read(value: Any) -> Fields:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple | set) or not all(
            item is None or isinstance(item, str) for item in value
        ):
            raise ValueError("a text or a list of texts")
        found = tuple(item for item in value if item)
        return {field: found} if found else {}

    return read


def ids(field: str) -> Reader:
    """Token ids. An empty list sets nothing."""

    def read(value: Any) -> Fields:
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if not isinstance(value, list | tuple | set | frozenset):
            raise ValueError("a list of token ids")
        return {field: tuple(sorted(value) if isinstance(value, set | frozenset) else value)} if value else {}

    return read


def mask(field: str, *, some: bool = False) -> Reader:
    """Token ids, or one boolean for every id of the vocabulary. Arrays and tensors do as well. some: at least one."""

    def read(value: Any) -> Fields:
        if callable(as_list := getattr(value, "tolist", None)):
            value = as_list()
        if isinstance(value, list | tuple) and value and all(isinstance(item, bool) for item in value):
            value = [place for place, item in enumerate(value) if item]
            if some and not value:
                raise ValueError("at least one true among the booleans")
        chosen = ids(field)(value).get(field, ())
        if some and not chosen:
            raise ValueError("at least one token id")
        if not all(type(one) is int and 0 <= one < 1 << 31 for one in chosen):
            raise ValueError("token ids, 0 to 2147483647, or one boolean for each token of the vocabulary")
        if len(set(chosen)) < len(chosen):
            raise ValueError("each token id once; a mask has booleans, not 0 and 1")
        return {field: chosen} if chosen else {}

    return read


def priority(value: Any) -> Fields:
    """A priority's name, or SGLang's number: above 0 is high, 0 is normal, below is low. The engine gets the number."""
    if isinstance(value, str):
        return {"priority": value}
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"one of {', '.join(PRIORITIES)}, or a whole number")
    return {"priority": "high" if value > 0 else "low" if value < 0 else "normal", "engine_priority": value}


def priority_downwards(value: Any) -> Fields:
    """vLLM's number: below 0 is high."""
    return priority(value if isinstance(value, bool) or not isinstance(value, int) else -value)


def logit_bias(value: Any) -> Fields:
    """Token id -> bias. In JSON the ids are text."""
    if not isinstance(value, Mapping):
        raise ValueError("a mapping of token ids to numbers")
    try:
        told = {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError, OverflowError):
        raise ValueError("a mapping of token ids to numbers") from None
    if len(told) < len(value) or any(isinstance(token, float) for token in value):
        raise ValueError("a mapping of token ids to numbers, each id once")
    return {"sampling.logit_bias": told} if told else {}


def do_sample(value: Any) -> Fields:
    """False is greedy at any temperature, as in transformers and VERL. True sets nothing."""
    return {} if _switch(value) else {"greedy": True}


def count_of_logprobs(value: Any) -> Fields:
    """A switch (OpenAI's chat, VERL), a count of most likely tokens (vLLM, OpenAI's completions), or LogprobOptions."""
    if isinstance(value, LogprobOptions):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        known = LogprobOptions.model_fields
        if strange := sorted(set(value) - set(known)):
            raise ValueError(f"{strange}: {', '.join(known)}")
        return {f"logprobs.{name}": item for name, item in value.items()}
    if isinstance(value, bool):
        return {"logprobs.sampled": value}
    return {"logprobs.sampled": True, **({"logprobs.top": _top(value)} if value else {})}


def sampled_only(value: Any) -> Fields:
    """0 and 1 in SkyRL, and true in VERL, ask for the sampled tokens' log-probabilities only."""
    if isinstance(value, bool) or value in (0, 1):
        return {"logprobs.sampled": value is not False}
    return count_of_logprobs(value)


def top_logprobs(value: Any) -> Fields:
    """The number of most likely tokens to return."""
    return {"logprobs.top": _top(value)}


def processors(value: Any) -> Fields:
    """A list of {"name", "params"}. An empty list sets nothing."""
    if not isinstance(value, list | tuple):
        raise ValueError('a list of {"name": ..., "params": {...}}')
    return {"logit_processors": tuple(value)} if value else {}


def prompt_logprobs(value: Any) -> Fields:
    """0 asks for the prompt's own tokens, N also for the N most likely ones."""
    if isinstance(value, bool):
        return {"logprobs.prompt": value}
    return {"logprobs.prompt": True, **({"prompt_top": _top(value)} if value else {})}


def logprob_start(value: Any) -> Fields:
    """In SGLang -1 means no prompt token, and 0 all of them."""
    if value not in (-1, 0):
        raise ValueError("-1 for no prompt token or 0 for all of them: a part of the prompt cannot be asked for")
    return {"logprobs.prompt": True} if value == 0 else {}


def logprob_kind(value: Any) -> Fields:
    """vLLM's logprobs_mode. Its processed values include top_k, top_p and min_p. SGLang's and ours do not."""
    kinds = {"raw_logprobs": "raw", "processed_logprobs": "scaled", "raw": "raw", "scaled": "scaled"}
    if value not in kinds:
        raise ValueError("raw_logprobs or processed_logprobs: logits do not come back")
    return {"logprobs.kind": kinds[value]}


def hidden_states(value: Any) -> Fields:
    """SGLang's switch asks for those of all tokens."""
    return {"hidden_states": value if isinstance(value, str) else ("all" if _switch(value) else "none")}


def json_schema(value: Any) -> Fields:
    """JSON text, the schema as an object, or a pydantic model."""
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, Mapping):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise ValueError("a JSON schema, as text or as an object")
    return {"sampling.json_schema": value}


def choice(value: Any) -> Fields:
    """A choice among texts, as a regular expression."""
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) and item for item in value):
        raise ValueError("a list of texts, at least one")
    special = set("\\^$.|?*+()[]{}")
    options = ("".join(f"\\{char}" if char in special else char for char in item) for item in value)
    return {"sampling.regex": f"({'|'.join(options)})"}


def any_json(value: Any) -> Fields:
    """Any JSON object."""
    return {"sampling.json_schema": '{"type": "object"}'} if _switch(value) else {}


def response_format(value: Any) -> Fields:
    """OpenAI's {"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": ...}}."""
    told = _mapping(value)
    kind = told.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return any_json(True)
    if kind == "json_schema":
        inside = told.get("json_schema")
        inside = inside if isinstance(inside, Mapping) else {}
        schema = inside.get("schema", inside.get("schema_"))
        if schema is None:
            raise ValueError('{"type": "json_schema", "json_schema": {"schema": ...}}')
        return json_schema(schema)
    raise ValueError('a "type" of text, json_object or json_schema')


def structured(value: Any) -> Fields:
    """vLLM's structured_outputs (formerly guided_decoding): one of json, regex, choice, grammar, json_object."""
    readers: dict[str, Reader] = {
        "json": json_schema,
        "regex": to("sampling.regex"),
        "choice": choice,
        "grammar": to("sampling.ebnf"),
        "json_object": any_json,
    }
    found: Fields = {}
    for name, item in _mapping(value).items():
        if item is None or item is False or name.startswith("_") or name in {"backend", "disable_fallback"}:
            continue
        if name not in readers:
            raise ValueError(f"{name!r} cannot be honoured; only {', '.join(readers)}")
        for field, told in readers[name](item).items():
            if field in found:
                raise ValueError(f"one of {', '.join(readers)}")
            found[field] = told
    if len(found) > 1:
        raise ValueError(f"one of {', '.join(readers)}")
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        dumped: Mapping[str, Any] = value.model_dump()
        return dumped
    raise ValueError("an object with named parts")


def _switch(value: Any) -> bool:
    if value in (True, False, 0, 1):
        return bool(value)
    raise ValueError("true or false")


def _top(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a count; all of the vocabulary (-1) is too much")
    return value
