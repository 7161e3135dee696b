"""Tools of a chat: the declared ones, and the calls in the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...messages.errors import InvalidField
from ...messages.model import RolloutResult, Tool
from ..data import read_tool


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a body.

    declared: the tools that the chat template shows to the model. schema: if the answer must be calls ("required", or a
    named tool), the JSON schema of the whole answer, a list of {"name", "parameters"}. one: keep only the first call.
    legacy: the body has `functions`, OpenAI's older form of tools. Then the answer has a `function_call`.
    silent: the choice is "none". The model is shown the tools all the same, as in vLLM, so that a conversation's
        prompts stay extensions of each other. Calls in the answer stay text.
    """

    declared: tuple[Tool, ...] = ()
    schema: str | None = None
    one: bool = False
    legacy: bool = False
    silent: bool = False

    @property
    def parsed(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.declared) and not self.silent

    @property
    def finish(self) -> str:
        """The finish_reason of an answer with calls."""
        return "function_call" if self.legacy else "tool_calls"

    def shown(self, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The calls as fields of a message."""
        if not calls:
            return {}
        return {"function_call": calls[0]["function"]} if self.legacy else {"tool_calls": list(calls)}

    def job_fields(self) -> dict[str, Any]:
        """The job's field `tools`, if there are any."""
        return {"tools": self.declared} if self.declared else {}

    def calls(self, result: RolloutResult, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """One sample as (text, valid calls in OpenAI's form). The text is None if there are calls."""
        if not self.parsed:
            return text, []
        if self.schema is not None:
            found = _forced(text, result)
        else:
            found = [call.as_chat().model_dump() for call in result.tool_calls if call.valid]
        if self.one:
            found = found[:1]
        return (None, found) if found else (text, [])


def read_tools(body: Mapping[str, Any]) -> Tools:
    """Read the tools of a body, or its `functions`. Raises InvalidField, which names the field."""
    if (functions := body.get("functions")) is not None or body.get("function_call") is not None:
        if body.get("tools") is not None or body.get("tool_choice") is not None:
            raise InvalidField("functions", functions, "either functions and function_call, or tools and tool_choice")
        return _read("functions", _as_tools(functions), "function_call", body.get("function_call"), legacy=True)
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidField("parallel_tool_calls", parallel, "true or false")
    return _read("tools", body.get("tools"), "tool_choice", body.get("tool_choice"), one=parallel is False)


def _as_tools(functions: Any) -> Any:
    if not isinstance(functions, list | tuple):
        return functions
    return [{"type": "function", "function": one} for one in functions]


def _read(field: str, raw: Any, choice_field: str, choice: Any, *, one: bool = False, legacy: bool = False) -> Tools:
    if not raw:
        if choice not in (None, "none"):
            raise InvalidField(choice_field, choice, f"only together with {field}")
        return Tools()
    if not isinstance(raw, list | tuple):
        raise InvalidField(field, raw, "a list")
    declared = tuple(read_tool(f"{field}[{place}]", schema) for place, schema in enumerate(raw))
    one = one or legacy
    if choice in (None, "auto"):
        return Tools(declared, None, one, legacy)
    if choice == "none":
        return Tools(declared, None, one, legacy, silent=True)
    if choice == "required" and not legacy:
        return Tools(declared, _schema(declared, one), one)
    named = choice if legacy else choice.get("function") if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    chosen = [tool for tool in declared if tool.function.name == name]
    if not chosen:
        words = "none, auto" if legacy else "none, auto, required"
        names = ", ".join(tool.function.name for tool in declared)
        raise InvalidField(choice_field, choice, f"{words}, or one of {names} as an object with its name")
    return Tools(declared, _schema(chosen, True), True, legacy)


def _schema(tools: Sequence[Tool], one: bool) -> str:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [tool.function.name]}, "parameters": tool.function.parameters},
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return json.dumps({"type": "array", "minItems": 1, **({"maxItems": 1} if one else {}), "items": items})


def _forced(text: str, result: RolloutResult) -> list[dict[str, Any]]:
    """The calls of an answer that had to follow `_schema`. Empty if the answer is not whole."""
    try:
        raw = json.loads(text)
    except ValueError:
        return []
    calls = []
    for number, call in enumerate(raw if isinstance(raw, list) else []):
        if isinstance(call, dict) and "name" in call:
            arguments = json.dumps(call.get("parameters", {}), ensure_ascii=False)
            calls.append(
                {
                    "id": f"call_{result.job_id[-12:]}{result.sample:04x}{number:02x}",
                    "type": "function",
                    "function": {"name": str(call["name"]), "arguments": arguments},
                }
            )
    return calls
