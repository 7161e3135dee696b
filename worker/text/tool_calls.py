"""Calls of tools in what a model wrote, read by SGLang's own parsers; what they cannot read is reported.

The text is the model's, so anything may stand in it: whatever does, the sample is answered.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ...messages.errors import RequestRefused
from ...messages.model import (
    FORMATS,
    MAX_CALLS,
    MAX_TOOL_NAME,
    GenerateJob,
    Tool,
    ToolCall,
    why_invalid,
    why_unsendable,
)
from ..sglang.tool_parsers import Raw, ToolParser, parser_names
from . import function_syntax

log = logging.getLogger(__name__)
MAX_TEXT = 2000
"""So much of an invalid call, and of why it is one, is told."""


def check_parser(name: str) -> None:
    """Raises RequestRefused for a parser that this worker's SGLang does not have."""
    known = parser_names()
    if FORMATS.get(name, name) not in known:
        raise RequestRefused(f"tool_parser={name!r}: json, xml, function, or one of {', '.join(sorted(known))}")
    try:
        ToolParser(FORMATS.get(name, name))
    except Exception as error:  # one needs what no job says
        raise RequestRefused(f"tool_parser={name!r}: this parser of SGLang cannot be used: {error}") from error


def calls_in(text: str, job: GenerateJob, sample: int) -> tuple[ToolCall, ...]:
    """The calls that sample number `sample` of a job with tools makes in `text`, in order; at most MAX_CALLS."""
    try:
        found = find_calls(text, job.tools, job.tool_parser)
    except Exception as error:  # a sample is not lost for what is in it
        log.exception("calls in sample %d of job %s cannot be read", sample, job.id)
        found = [_invalid(f"they cannot be read: {type(error).__name__}: {error}", text)]
    if len(found) > MAX_CALLS:
        why = f"{len(found)} calls, at most {MAX_CALLS} are taken; this one and those behind it are left out"
        found[MAX_CALLS - 1 :] = [_invalid(why, found[MAX_CALLS - 1].text or text)]
    return tuple(call.model_copy(update={"id": f"call_{job.id}_{sample}_{i}"}) for i, call in enumerate(found))


def find_calls(text: str, tools: Sequence[Tool], parser: str) -> list[ToolCall]:
    """Calls in `text`, ids still empty. parser: as GenerateJob.tool_parser has it."""
    by_name = {tool.function.name: tool for tool in tools}
    name = FORMATS.get(parser, parser)
    calls: list[ToolCall] = []
    for part, closed, raw in _read(text, name, tools):
        if raw:
            calls += [_call(called, arguments, by_name, part) for called, arguments in raw]
        elif not closed:
            calls.append(_invalid("it is not finished: the sample ended in it", part))
        else:
            calls.append(_invalid(f"the {name} parser makes no call of {', '.join(by_name)} of it", part))
    return calls


def _read(text: str, name: str, tools: Sequence[Tool]) -> Iterator[tuple[str, bool, list[Raw]]]:
    """Pieces of text in which there should be calls, whether each is whole, and what was read of it."""
    if name == FORMATS["function"]:
        for part, closed in function_syntax.pieces(text, frozenset(tool.function.name for tool in tools)):
            yield part, closed, function_syntax.read(part) if closed else []
        return
    parser = ToolParser(name, tools)
    for part, closed in _parts(text, parser):
        yield part, closed, parser.read(part)


def _parts(text: str, parser: ToolParser) -> Iterator[tuple[str, bool]]:
    """Pieces of text in which there should be a call, and whether each is whole.

    Where a syntax has opening and closing tags these are the pieces between them; else the whole text, if the parser
    sees a call in it.
    """
    opening, closing = parser.opening, parser.closing
    if not all(tag.startswith("<") and tag.endswith(">") for tag in (opening, closing)):
        if parser.sees_call(text):
            yield text, True
        return
    for match in re.finditer(f"{re.escape(opening)}(.*?)({re.escape(closing)}|\\Z)", text, re.DOTALL):
        inside, end = match.group(1).strip(), match.group(2)
        yield f"{parser.begin or opening}{inside}{(parser.end or closing) if end else ''}", bool(end)


def _call(name: str | None, parameters: str, tools: dict[str, Tool], text: str) -> ToolCall:
    try:
        arguments = json.loads(parameters) if parameters else {}
    except (ValueError, RecursionError) as error:
        return _invalid(f"the arguments are no JSON: {error}", text, name)
    if not isinstance(arguments, dict):
        return _invalid("the arguments are no object", text, name)
    if (why := why_unsendable(arguments)) is not None:
        return _invalid(f"the arguments cannot travel: {why}", text, name)
    if name not in tools:
        return _invalid(f"there is no tool {_shown(name)!r}, only {', '.join(tools)}", text, name, arguments)
    if (why := why_invalid(tools[name], arguments)) is not None:
        return _invalid(why, text, name, arguments)
    return ToolCall(id="", name=name, arguments=arguments)


def _invalid(why: str, text: str, name: str | None = None, arguments: dict[str, Any] | None = None) -> ToolCall:
    return ToolCall(id="", name=_shown(name), arguments=arguments, error=why[:MAX_TEXT], text=text[:MAX_TEXT])


def _shown(name: str | None) -> str | None:
    """A name that can travel, and stand in the next prompt."""
    return None if name is None else name.encode(errors="replace").decode()[:MAX_TOOL_NAME]
