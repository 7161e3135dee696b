"""Tools: how a job declares them, and the calls that a model generated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from .base import PlainObject, Record, plain
from .chat import MAX_TOOL_NAME, ChatToolCall, FunctionCall

FORMATS: Mapping[str, str] = {"json": "qwen25", "xml": "qwen3_coder", "function": "pythonic"}
"""Syntax -> the parser of SGLang that reads it: `<tool_call>{"name": …}</tool_call>`,
`<tool_call><function=name><parameter=x>…`, and `[name(x=1)]`. Its other parsers go by their own names."""


class ToolFunction(Record):
    """parameters: JSON schema of an object. The chat template shows it to the model."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str = Field(default="", max_length=16384)
    parameters: PlainObject = Field(default_factory=lambda: {"type": "object", "properties": {}}, max_length=64)
    strict: bool | None = None


class Tool(Record):
    """A tool in OpenAI's form."""

    type: Literal["function"] = "function"
    function: ToolFunction

    def rendered(self) -> dict[str, Any]:
        """The tool for a chat template."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class ToolCall(Record):
    """A call that the model made, or tried to make.

    id: unique in the job. Parsing the sample again gives the same id.
    name, arguments: None if they could not be read. error: why the call is invalid, None for a valid one.
    text: the model's text of an invalid call.
    """

    id: str = Field(max_length=128)
    name: str | None = Field(default=None, max_length=MAX_TOOL_NAME)
    arguments: PlainObject | None = None
    error: str | None = None
    text: str | None = None

    @property
    def valid(self) -> bool:
        """Whether the call can be run."""
        return self.error is None

    def as_chat(self) -> ChatToolCall:
        """The call for the assistant's message in the next prompt."""
        arguments = json.dumps(self.arguments or {}, ensure_ascii=False)
        return ChatToolCall(id=self.id, function=FunctionCall(name=self.name or "invalid", arguments=arguments))


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict,),
    "null": (type(None),),
}


def why_invalid(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """The first error in these arguments, None if there is none. It checks names, required ones and plain types."""
    schema = tool.function.parameters
    properties = schema.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
    required = schema.get("required")  # it may be anything that the schema's author wrote
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list | tuple) else []
    if missing := [name for name in names if name not in arguments]:
        return f"{tool.function.name}: arguments without {', '.join(missing)}"
    for name, value in arguments.items():
        if name not in known:
            if schema.get("additionalProperties") is False:
                return f"{tool.function.name}: no argument {name!r}, only {', '.join(known) or 'none'}"
            continue
        wanted = known[name].get("type") if isinstance(known[name], dict) else None
        several = wanted if isinstance(wanted, list | tuple) else [wanted]
        kinds = [kind for kind in several if isinstance(kind, str)]
        if kinds and not any(_is(value, kind) for kind in kinds):
            return f"{tool.function.name}: {name}={value!r} is no {' or '.join(kinds)}"
    return None


def why_unsendable(value: Any) -> str | None:
    """Why no message can hold a value, None if one can."""
    try:
        plain(value)
    except ValueError as error:
        return str(error)
    return None


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):  # Python counts it as an integer
        return name in {"boolean"} or name not in _TYPES
    return name not in _TYPES or isinstance(value, _TYPES[name])
