"""`rolloutmq config`: what a configuration file means here, and what holds in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Json, alone, group, say

app = group("Explain a configuration file, also SkyRL's or VERL's.")


@app.command("explain")
def explain_file(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML, TOML or JSON: ours, or with SkyRL's or VERL's settings in it.")
    ],
    json: Json = False,
) -> None:
    """Each key of a file: what it became, or why it is ignored or refused. Exit code 1 if something is refused."""
    from ..config import explain
    from ..config.report import explained_lines, explained_state

    explained = explain(file)
    say(explained_state(explained), explained_lines(explained), json)
    raise typer.Exit(1 if explained.refused else 0)


@app.command("show", context_settings={"ignore_unknown_options": True})
def show(
    flags: Annotated[
        list[str] | None, typer.Argument(metavar="FLAGS", help="After --: flags that `rolloutmq worker` would get.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="The file that --config of the worker would name.")] = None,
    json: Json = False,
) -> None:
    """Show every setting that a worker would have, and where it comes from: flag, environment, file or default.

    \b
    rolloutmq config show --config pool.yaml -- --tp 4
    """
    from ..config import load_settings
    from ..config.report import settings_lines, settings_state

    settings = load_settings(config, context=worker_context(flags or []))
    say(settings_state(settings), settings_lines(settings), json)
    for build in (settings.worker, settings.job, settings.group_rules, settings.episode_limits, settings.tool_limits):
        build()
    if "engine.model" in settings.said:
        settings.engine()


def worker_context(flags: list[str]) -> Any:
    """The context that `rolloutmq worker FLAGS` would have. Ends the command for an unknown flag."""
    from .worker import worker

    return alone(worker, "worker").make_context("rolloutmq worker", list(flags))
