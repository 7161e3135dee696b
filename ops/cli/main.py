"""The command line: a table of commands, each imported when it is run."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from ... import __version__
from .options import Plain, alone

GROUPS: dict[str, dict[str, tuple[str, str, str]]] = {
    "Serve": {
        "worker": ("worker", "worker", "Serve a pool with one SGLang engine until SIGTERM or Ctrl-C."),
        "scale": ("scale", "scale", "Start and drain workers, as many as the pool needs."),
        "up": ("scale", "up", "Run a whole pool until Ctrl-C."),
        "exporter": ("pool", "exporter", "Serve the pool's metrics for Prometheus."),
        "gateway": ("gateway", "gateway", "Serve the pool to clients of OpenAI's API."),
    },
    "Ask a pool": {
        "generate": ("generate", "generate", "Generate in the pool and print the answer."),
        "submit": ("pool", "submit", "Answer every line of a file exactly once."),
        "embed": ("tasks", "embed", "Embed every line of a file, on workers with --task embed."),
        "score": ("tasks", "score", "Score continuations of a prompt, or the lines of a file."),
        "decode": ("tasks", "decode", "Print the text of token ids."),
    },
    "Look": {
        "status": ("pool", "status", "Show the queue, the workers and the weights they serve."),
        "top": ("pool", "top", "Watch a pool live: its queue, workers, versions and speed."),
        "dashboard": ("dashboard", "dashboard", "Serve a page of a live pool, or of a run's journal."),
        "report": ("dashboard", "report", "Sum up a run from its journal."),
        "doctor": ("pool", "doctor", "Check Redis and this host, and say what to do."),
        "weights": ("weights", "weights", "Show weights versions in the pool's ledger."),
        "snapshots": ("weights", "snapshots", "List weights versions on disk; pin and remove them."),
        "job": ("journal", "job", "Show a job's whole life, from a journal or the pool."),
        "journal": ("journal", "app", "Print a journal, or export it."),
        "config": ("config", "app", "Explain a configuration file, also SkyRL's or VERL's."),
    },
    "Operate": {
        "control": ("control", "app", "Tell workers to do something, and wait for each one's answer."),
        "cancel": ("pool", "cancel", "Cancel jobs, queued or running."),
        "dead": ("dead", "dead", "List, show, requeue or drop jobs that were given up."),
        "replies": ("pool", "replies", "List or drop results that wait for their clients."),
        "ops": ("operations", "app", "Run long operator work in the background."),
        "replay": ("replay", "replay", "Generate or score recorded samples again, and compare."),
    },
    "Try": {
        "demo": ("trial", "demo", "Run asynchronous RL here, while workers die and join."),
        "redis": ("trial", "redis", "Run an embedded redis-server on this machine until Ctrl-C."),
        "tiny-model": ("trial", "tiny_model", "Write a tiny random Qwen2-style model and its tokenizer."),
    },
}
"""What `rolloutmq --help` shows: heading -> name -> (module of this room, what it has, the command's line)."""
COMMANDS = {name: found for group in GROUPS.values() for name, found in group.items()}


class Commands(Plain):
    """Imports a command when it is run: help for all of them needs this file alone."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, load(name) if name in COMMANDS else placeholder, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands under their headings."""
        for heading, group in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(max(map(len, COMMANDS))), line) for name, (*_, line) in group.items()])


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
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rolloutmq {__version__}")
        raise typer.Exit


@app.callback()
def _rolloutmq(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """A rollout pool for asynchronous RL: Redis jobs in, version-tagged samples out."""


def _placeholder() -> None: ...


for _name, (_, _, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_placeholder)
