"""The operations by name, and the check of their parameters. Every module of this room is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from functools import cache
from typing import Any

from pydantic import ValidationError

from ....messages.errors import InvalidField
from ....messages.model import as_invalid_field
from .operation import REGISTRY, Operation, Params


@cache
def _load_catalog() -> None:
    room = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(sys.modules[room].__path__):
        importlib.import_module(f"{room}.{module.name}")


def operations() -> dict[str, Operation[Any]]:
    """All of them, by name."""
    _load_catalog()
    return dict(sorted(REGISTRY.items()))


def checked(name: object, params: object) -> tuple[Operation[Any], Params]:
    """The operation and its parameters. Raises InvalidField naming what is not allowed and what is."""
    known = operations()
    if not isinstance(name, str) or name not in known:
        raise InvalidField("operation", name, f"one of {', '.join(known)}")
    chosen = known[name]
    if not isinstance(params, dict):
        raise InvalidField("params", params, "a map of parameters")
    if unknown := [key for key in params if key not in chosen.params.model_fields]:
        allowed = ", ".join(chosen.params.model_fields) or "nothing: it has no parameters"
        raise InvalidField(str(unknown[0]), params[unknown[0]], f"no parameter of {name}; it takes {allowed}")
    try:
        return chosen, chosen.params.model_validate(params)
    except ValidationError as error:
        raise as_invalid_field(error) from None
