"""Checks of processors' parameters. Each raises InvalidField."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...messages.errors import InvalidField


def only(params: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check that there are no parameters but `known`."""
    names = sorted(known)
    for name, value in params.items():
        if name not in names:
            raise InvalidField(name, value, f"no such parameter; there are {', '.join(names)}")


def token_ids(params: Mapping[str, Any], vocab_size: int, name: str = "token_ids") -> list[int]:
    """Return a parameter that is a list of the model's token ids, at least one, each once."""
    value = params.get(name)
    if not isinstance(value, list | tuple) or not value:
        raise InvalidField(name, value, "a list of token ids, at least one")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidField(name, token, f"token ids of this model are 0 to {vocab_size - 1}")
    return sorted(set(value))


def count(params: Mapping[str, Any], name: str) -> int:
    """Return a parameter that is a number of tokens, 0 or more."""
    value = params.get(name)
    if type(value) is not int or value < 0:
        raise InvalidField(name, value, "a number of tokens, 0 or more")
    return value
