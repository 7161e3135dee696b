"""Checks of processors' parameters; each raises InvalidField."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...messages.errors import InvalidField


def only(params: Mapping[str, Any], known: Iterable[str]) -> None:
    """No parameters but these."""
    names = sorted(known)
    for name, value in params.items():
        if name not in names:
            raise InvalidField(name, value, f"no such parameter; there are {', '.join(names)}")


def token_ids(params: Mapping[str, Any], vocab_size: int, name: str = "token_ids") -> list[int]:
    """A non-empty list of different token ids of this model."""
    value = params.get(name)
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(name, value, "a list of token ids, at least one")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidField(name, token, f"token ids of this model are 0 to {vocab_size - 1}")
    return sorted(set(value))


def count(params: Mapping[str, Any], name: str) -> int:
    """A number of tokens."""
    value = params.get(name)
    if type(value) is not int or value < 0:
        raise InvalidField(name, value, "a number of tokens, 0 or more")
    return value
