"""How a command tells what went wrong: one line on stderr and exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from redis.exceptions import RedisError

from ...messages.errors import RolloutMQError


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors raised on purpose, and Redis' own, end the command without a traceback."""
    try:
        yield
    except (RolloutMQError, RedisError) as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
