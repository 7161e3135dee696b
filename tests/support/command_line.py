"""The real command line, read and not run."""

from __future__ import annotations

from typing import Any

import typer

from rolloutmq.ops.cli import app


def parse(arguments: list[str]) -> None:
    """Let the command line read a command, to the last flag, and do nothing. Raises typer's UsageError."""
    command: Any = typer.main.get_command(app)
    name, rest, context = "rolloutmq", list(arguments), None
    while hasattr(command, "commands"):
        context = command.make_context(name, rest, parent=context)
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    command.make_context(name, rest, parent=context)
