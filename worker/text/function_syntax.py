"""Calls in Python's syntax, `[name(x=1), other(y="a")]`, found and read in time that grows with the text.

SGLang's own parser for it looks with a regular expression that takes exponential time on texts a model writes easily
(`[f(a=1, a=1, …` without an end); nothing else happens in the worker's process meanwhile.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator

_START = re.compile(r"\[\s*([A-Za-z_]\w*)\(\s*(?:\)|[A-Za-z_]\w*\s*=)")
_STEPS = re.compile(r"[\[\](){}'\"\n\\]")
_CLOSES = {"[": "]", "(": ")", "{": "}"}


def pieces(text: str, names: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Lists of calls in `text`, and whether each is whole; one that is not is told only if it begins with a tool of
    `names`: prose has brackets, too."""
    at = 0
    while (found := _START.search(text, at)) is not None:
        at, closed = _end(text, found.start())
        if closed or found.group(1) in names:
            yield text[found.start() : at], closed or at < len(text)


def read(piece: str) -> list[tuple[str | None, str]]:
    """(name, arguments as JSON) of each call in a piece; empty if it is no list of calls with literals by name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts, which are the model's
            listed = ast.parse(piece, mode="eval").body
        if not isinstance(listed, ast.List):
            return []
        return [_call(one) for one in listed.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, SystemError):
        return []  # the last three: nested too deep, each for another stage of Python's compiler


def _call(one: ast.expr) -> tuple[str | None, str]:
    if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Name) or one.args:
        raise ValueError("no call by name")
    arguments = {}
    for keyword in one.keywords:
        if keyword.arg is None:
            raise ValueError("no call by name")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return one.func.id, json.dumps(arguments)


def _end(text: str, start: int) -> tuple[int, bool]:
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
