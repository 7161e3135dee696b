"""The command line: a table of commands, each imported when it is run."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer

from .options import Plain, alone

COMMANDS: dict[str, tuple[str, str, str]] = {
    "worker": ("worker", "worker", "Serve a pool with one SGLang engine until SIGTERM or Ctrl-C."),
    "submit": ("pool", "submit", "Answer every line of a file exactly once."),
    "status": ("pool", "status", "Show the queue, the workers and the weights they serve."),
    "workers": ("pool", "workers", "Show the workers, or how long their starts took."),
    "top": ("pool", "top", "Watch a pool live: its queue, workers, versions and speed."),
    "scale": ("scale", "scale", "Start and drain workers here, as many as the pool needs."),
    "up": ("scale", "up", "Run a whole pool on this machine until Ctrl-C."),
    "exporter": ("pool", "exporter", "Serve the pool's metrics for Prometheus."),
    "doctor": ("pool", "doctor", "Check Redis and this host, and say what to do."),
    "generate": ("generate", "generate", "Generate in the pool and print the answer."),
    "embed": ("tasks", "embed", "Embed every line of a file, on workers with --task embed."),
    "reward": ("tasks", "reward", "Score every line of a file with a reward model."),
    "score": ("tasks", "score", "Print how likely each continuation of a prompt is."),
    "decode": ("tasks", "decode", "Print the text of token ids."),
    "cancel": ("pool", "cancel", "Cancel jobs, queued or running."),
    "replies": ("pool", "replies", "List or drop results that wait for their clients."),
    "dead": ("dead", "app", "List, requeue or drop jobs that were given up."),
    "weights": ("weights", "app", "Show weights versions, in the pool's ledger and on disk."),
    "control": ("control", "app", "Tell workers to do something, and wait for each one's answer."),
    "ops": ("operations", "app", "Run long operator work in the background."),
    "config": ("config", "app", "Explain a configuration file, also SkyRL's or VERL's."),
    "redis": ("trial", "redis", "Run an embedded redis-server on this machine until Ctrl-C."),
    "tiny-model": ("trial", "tiny_model", "Write a tiny random Qwen2-style model and its tokenizer."),
    "journal": ("journal", "app", "Print a journal, export it, or record a pool."),
    "job": ("journal", "job", "Show a job's whole life, from a journal or the pool."),
    "replay": ("replay", "replay", "Generate or score recorded samples again, and compare."),
    "demo": ("trial", "demo", "Run asynchronous RL here, while workers die and join."),
}
"""Name -> (module of this room, what it has, the line of `rolloutmq --help`)."""


class Commands(Plain):
    """Imports a command when it is run: help for all of them needs this file alone."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else placeholder, rest


def load(name: str) -> Any:
    """The click command of this name."""
    module, attribute, _ = COMMANDS[name]
    found = getattr(import_module(f".{module}", __package__), attribute)
    if not isinstance(found, typer.Typer):
        return alone(found, name)
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    name="rolloutmq",
    cls=Commands,
    help="A rollout pool for asynchronous RL: Redis jobs in, version-tagged samples out.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


def _placeholder() -> None: ...


for _name, (_, _, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_placeholder)
