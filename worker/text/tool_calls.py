"""Calls of tools in what a model wrote: read by SGLang's parsers, or by our own for Python's syntax.

The text is the model's, so anything may stand in it. What cannot be read is reported, and the sample is answered.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import warnings
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

log = logging.getLogger(__name__)
MAX_TEXT = 2000
"""Characters of an invalid call, and of why it is invalid, that the result has."""
_START = re.compile(r"\[\s*([A-Za-z_]\w*)\(\s*(?:\)|[A-Za-z_]\w*\s*=)")
_STEPS = re.compile(r"[\[\](){}'\"\n\\]")
_CLOSES = {"[": "]", "(": ")", "{": "}"}


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
    """The calls in the `text` of a sample of a job with tools, in order; at most MAX_CALLS."""
    try:
        found = find_calls(text, job.tools, job.tool_parser)
    except Exception as error:  # a sample is not lost for what is in it
        log.exception("calls in sample %d of job %s cannot be read", sample, job.id)
        found = [_invalid(f"they cannot be read: {type(error).__name__}: {error}", text)]
    if len(found) > MAX_CALLS:
        why = f"{len(found)} calls, at most {MAX_CALLS} are taken; this one and those behind it are left out"
        found[MAX_CALLS - 1 :] = [_invalid(why, found[MAX_CALLS - 1].text or text)]
    return _numbered(found, job, sample)


def unread(why: str, text: str, job: GenerateJob, sample: int) -> tuple[ToolCall, ...]:
    """What stands for the calls of a text that cannot be read: one that is invalid, and says why."""
    return _numbered([_invalid(f"they cannot be read: {why}", text)], job, sample)


def _numbered(found: Sequence[ToolCall], job: GenerateJob, sample: int) -> tuple[ToolCall, ...]:
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
        for part, closed in _python_lists(text, frozenset(tool.function.name for tool in tools)):
            yield part, closed, _python_calls(part) if closed else []
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


def _python_lists(text: str, names: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Lists of calls in Python's syntax, `[name(x=1), other(y="a")]`, and whether each is whole.

    One that is not whole counts only if it begins with a tool of `names`: prose has brackets, too. The time this takes
    grows with the text. SGLang's own parser uses a regular expression that takes exponential time on texts that a model
    writes easily (`[f(a=1, a=1, …` without an end).
    """
    at = 0
    while (found := _START.search(text, at)) is not None:
        at, closed = _list_end(text, found.start())
        if closed or found.group(1) in names:
            yield text[found.start() : at], closed or at < len(text)


def _python_calls(piece: str) -> list[tuple[str | None, str]]:
    """(name, arguments as JSON) of each call in a piece. Empty if it is no list of calls with literals by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts, which are the model's
            listed = ast.parse(piece, mode="eval").body
        if not isinstance(listed, ast.List):
            return []
        return [_python_call(one) for one in listed.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, SystemError):
        return []  # the last three: nested too deep, each for another stage of Python's compiler


def _python_call(one: ast.expr) -> tuple[str | None, str]:
    if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Name) or one.args:
        raise ValueError("no call by name")
    arguments = {}
    for keyword in one.keywords:
        if keyword.arg is None:
            raise ValueError("no call by name")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return one.func.id, json.dumps(arguments)


def _list_end(text: str, start: int) -> tuple[int, bool]:
    """Where the bracket at `start` is closed, and True; else where it is clear that it is not, and False."""
    awaited: list[str] = []
    quote, at = "", start
    while (step := _STEPS.search(text, at)) is not None:
        char, at = step.group(), step.end()
        if quote:
            if char == "\\":
                at += 1
            elif char == "\n":
                return at, False
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _CLOSES:
            awaited.append(_CLOSES[char])
        elif char in _CLOSES.values():
            if awaited.pop() != char:
                return at, False
            if not awaited:
                return at, True
    return len(text), False
