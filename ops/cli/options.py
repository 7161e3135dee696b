"""Options that several commands share, and how text from a command line becomes configuration."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError

from ...messages.errors import ConfigError
from ...messages.model import as_invalid_field

RedisUrl = Annotated[str, typer.Option(envvar="ROLLOUTMQ_REDIS", help="redis://, rediss:// or unix:// URL.")]
Pool = Annotated[str, typer.Option(envvar="ROLLOUTMQ_POOL", help="Name of the pool.")]
Model = TypeVar("Model", bound=BaseModel)


def as_config(settings: type[Model], /, **fields: Any) -> Model:
    """The settings object, or InvalidField naming field, value and what is allowed."""
    try:
        return settings(**fields)
    except ValidationError as error:
        raise as_invalid_field(error) from None


def parse_extra(items: list[str]) -> dict[str, Any]:
    """NAME=JSON arguments; a value that is not JSON is taken as text. Raises ConfigError without a '='."""
    extra: dict[str, Any] = {}
    for item in items:
        name, found, value = item.partition("=")
        if not found or not name.isidentifier():
            raise ConfigError(f"{item!r}: NAME=VALUE is needed, such as chunked_prefill_size=2048")
        try:
            extra[name] = json.loads(value)
        except json.JSONDecodeError:
            extra[name] = value
    return extra
