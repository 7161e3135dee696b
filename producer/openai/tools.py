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
    """

    declared: tuple[Tool, ...] = ()
    schema: str | None = None
    one: bool = False

    def job_fields(self) -> dict[str, Any]:
        """The job's field `tools`, if there are any."""
        return {"tools": self.declared} if self.declared else {}

    def calls(self, result: RolloutResult, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """One sample as (text, valid calls in OpenAI's form). The text is None if there are calls."""
        if not self.declared:
            return text, []
        if self.schema is not None:
            found = _forced(text, result)
        else:
            found = [call.as_chat().model_dump() for call in result.tool_calls if call.valid]
        if self.one:
            found = found[:1]
        return (None, found) if found else (text, [])


def read_tools(body: Mapping[str, Any]) -> Tools:
    """Read the tools of a body. Raises InvalidField, which names the field."""
    raw, choice = body.get("tools"), body.get("tool_choice")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidField("parallel_tool_calls", parallel, "true or false")
    if not raw:
        if choice not in (None, "none"):
            raise InvalidField("tool_choice", choice, "only together with tools")
        return Tools()
    if not isinstance(raw, list | tuple):
        raise InvalidField("tools", raw, "a list")
    declared = tuple(read_tool(f"tools[{place}]", one) for place, one in enumerate(raw))
    one = parallel is False
    if choice in (None, "auto"):
        return Tools(declared, one=one)
    if choice == "none":
        return Tools()
    names = [tool.function.name for tool in declared]
    if choice == "required":
        return Tools(declared, _schema(declared, one), one)
    named = choice.get("function", {}).get("name") if isinstance(choice, Mapping) else None
    if named not in names:
        raise InvalidField(
            "tool_choice", choice, f"none, auto, required, or one of {', '.join(names)} as an object with its name"
        )
    chosen = [tool for tool in declared if tool.function.name == named]
    return Tools(declared, _schema(chosen, True), one=True)


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
