"""Flags of commands, derived from the fields of settings models; and NAME=JSON texts as settings.

Name, type, default and help of a setting are said once, in its model. Nothing here needs typer.
"""

from __future__ import annotations

import json
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ..messages.errors import ConfigError
from ..messages.model import as_invalid_field

Model = TypeVar("Model", bound=BaseModel)

UNITS = ("_url", "_size", "_s")
"""Endings of field names that flags leave out: lease_s is --lease, tp_size is --tp."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of a model as a command line sees it.

    name: as a Python parameter; the flag itself has dashes. kind: type of one value. many: it may be repeated. pairs:
    each value is NAME=JSON. default: None if the field has none, or is empty.
    """

    field: str
    name: str
    kind: type
    many: bool
    pairs: bool
    required: bool
    default: Any
    help: str

    def value(self, given: Any) -> Any:
        """The field's value for the text that was typed. Raises ConfigError for a pair without "="."""
        return parse_extra(list(given)) if self.pairs else given


def flags_of(model: type[BaseModel]) -> list[Flag]:
    """A flag for every field, in the model's order."""
    flags = []
    for field, info in model.model_fields.items():
        kind, many, pairs = _shape(info.annotation)
        default = None if info.is_required() or many else info.default
        name = next((field.removesuffix(unit) for unit in UNITS if field.endswith(unit)), field)
        name = _singular(name) if many else name
        told = " ".join((info.description or "").split())  # attribute docstrings have line breaks
        flags.append(Flag(field, name, kind, many, pairs, info.is_required(), default, told))
    return flags


def takes_text(annotation: Any) -> bool:
    """Whether a field of this type takes a text, or a word, as it is."""
    return _shape(annotation)[:2] == (str, False)


def _shape(annotation: Any) -> tuple[type, bool, bool]:
    """(type of one value, repeatable, NAME=JSON)."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape(inner[0])
    if origin in {Union, types.UnionType}:
        return _shape(next(one for one in inner if one is not types.NoneType))
    if origin is Literal:  # the model refuses other words, in one wording wherever they come from
        return str, False, False
    if origin is dict:
        return str, True, True
    if origin is not None:
        return _shape(inner[0])[0], True, False
    return annotation, False, False


def _singular(name: str) -> str:
    return f"{name[:-3]}y" if name.endswith("ies") else name.removesuffix("s")


def as_config(settings: type[Model], /, **fields: Any) -> Model:
    """The settings object. Raises InvalidField naming field, value and what is allowed."""
    try:
        return settings(**fields)
    except ValidationError as error:
        raise as_invalid_field(error) from None


def parse_extra(items: list[str]) -> dict[str, Any]:
    """NAME=JSON arguments; a value that is not JSON is taken as text. Raises ConfigError without a "="."""
    extra: dict[str, Any] = {}
    for item in items:
        name, found, value = item.partition("=")
        if not found or not name.isidentifier():
            raise ConfigError(f"{item!r}: NAME=VALUE is needed, such as chunked_prefill_size=2048")
        extra[name] = json_or_text(value)
    return extra


def json_or_text(text: str) -> Any:
    """The value that a text is as JSON, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
