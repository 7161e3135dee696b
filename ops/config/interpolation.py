"""Resolves values that refer to others, as OmegaConf does: ${a.b}, ${oc.env:NAME,default}, ${oc.select:a.b,default}.

Trainers' files use absolute names, names relative to a key (${.a}, ${..a}), those two resolvers, and any of them inside
one another or inside text. Everything else is refused by name. docs/architecture.md says why this is not OmegaConf.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

MISSING = "???"
"""How Hydra writes a value that somebody has to set."""
_NAME = re.compile(r"[A-Za-z_@][\w@-]*(\.[\w@-]+)*")
_WORDS = {"null": None, "true": True, "false": False}
_DEPTH = 32


class CannotResolve(ValueError):
    """An interpolation has no value. The text names it and says why."""


class Resolver:
    """Resolves values of one document."""

    def __init__(self, document: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._document = document
        self._environment = os.environ if environment is None else environment
        self._under_way: set[tuple[str, ...]] = set()

    def value(self, value: Any, path: tuple[str, ...] = (), depth: int = 0) -> Any:
        """Return `value` with all its interpolations resolved. path: of its key. Raises CannotResolve."""
        if depth > _DEPTH:
            raise CannotResolve(f"{'.'.join(path)}: it comes back to itself")
        if isinstance(value, str):
            return self._text(value, path, depth)
        if isinstance(value, Mapping):
            return {key: self.value(item, (*path, key), depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, (*path, str(index)), depth) for index, item in enumerate(value)]
        return value

    def _text(self, text: str, path: tuple[str, ...], depth: int) -> Any:
        if "${" not in text:
            return text
        if depth > _DEPTH:
            raise CannotResolve(f"{'.'.join(path)}: interpolations are nested at most {_DEPTH} deep")
        parts: list[str] = []
        at = 0
        while (start := text.find("${", at)) >= 0:
            if start and text[start - 1] == "\\":
                parts.append(f"{text[at : start - 1]}${{")
                at = start + 2
                continue
            end = _end(text, start + 2)
            found = self._inside(text[start + 2 : end], path, depth)
            if start == 0 and end == len(text) - 1:
                return found
            parts += [text[at:start], str(found)]
            at = end + 1
        return "".join([*parts, text[at:]])

    def _inside(self, body: str, path: tuple[str, ...], depth: int) -> Any:
        function, *rest = _split(body, ":", 1)
        if not rest:
            return self._at(str(self._text(body, path, depth + 1)).strip(), path, depth)
        name, *others = _split(rest[0], ",")
        name = str(self._text(name, path, depth + 1)).strip()
        default = [self._argument(part.strip(), path, depth) for part in others[:1]]
        match function.strip():
            case "oc.env":
                if name in self._environment:
                    return self._environment[name]
                if default:
                    return default[0]
                raise CannotResolve(f"${{{body}}}: no environment variable {name}, and no default")
            case "oc.select":
                try:
                    found = self._at(name, path, depth)
                except _Nothing:
                    found = MISSING
                return (default[0] if default else None) if found == MISSING else found
        raise CannotResolve(f"${{{body}}}: only oc.env and oc.select are known as functions")

    def _argument(self, text: str, path: tuple[str, ...], depth: int) -> Any:
        if "${" in text:
            return self._text(text, path, depth + 1)
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text[1:-1] if len(text) > 1 and text[0] == text[-1] == "'" else text
        except (ValueError, RecursionError) as error:
            raise CannotResolve(f"a default is nested too deep, or a number too long: {error}") from None

    def _at(self, name: str, path: tuple[str, ...], depth: int) -> Any:
        start = len(name) - len(name.lstrip("."))
        if start > len(path) or not _NAME.fullmatch(name[start:]):
            raise CannotResolve(f"${{{name}}}: a name such as ${{a.b}}, ${{.c}}, ${{oc.env:NAME}} is needed")
        base = path[: len(path) - start] if start else ()
        whole = (*base, *name[start:].split("."))
        if whole in self._under_way:
            raise CannotResolve(f"{'.'.join(whole)}: it comes back to itself")
        self._under_way.add(whole)
        try:
            return self._found(name, whole, depth)
        finally:
            self._under_way.remove(whole)

    def _found(self, name: str, whole: tuple[str, ...], depth: int) -> Any:
        found: Any = self._document
        for place, part in enumerate(whole):
            if isinstance(found, str):  # ${a.b} where a itself points elsewhere
                found = self.value(found, whole[:place], depth + 1)
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                raise _Nothing(f"${{{name}}}: this file has no {'.'.join(whole)}")
        return self.value(found, whole, depth + 1)


class _Nothing(CannotResolve):
    """There is no such name."""


def _end(text: str, start: int) -> int:
    """The index of the brace that closes the interpolation whose inside begins at `start`."""
    depth = 1
    for index in range(start, len(text)):
        if text[index] == "{":
            depth += 1
        elif text[index] == "}":
            depth -= 1
            if depth == 0:
                return index
    raise CannotResolve(f"{text}: a ${{ without its }}")


def _split(text: str, at: str, most: int = -1) -> list[str]:
    """Split at `at`, at most `most` times, but not inside brackets and quotes."""
    parts: list[str] = []
    depth, last, quote = 0, 0, ""
    for index, char in enumerate(text):
        if quote or char in "'\"":
            quote = "" if char == quote else quote or char
            continue
        depth += (char in "{[(") - (char in "}])")
        if char == at and depth == 0 and len(parts) != most:
            parts.append(text[last:index])
            last = index + 1
    return [*parts, text[last:]]
