"""`rolloutmq worker`. Its flags are the fields of worker/config.py and worker/sglang/config.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ...messages.redis import DEFAULT_URL
from ..config import load_settings, worker_flags
from .options import LogLevel, Pool, RedisUrl, derived, given, log_to_stderr, parameter


def _worker(context: typer.Context, config: Path | None, log_level: str, **_: Any) -> None:
    """Serve with the settings of file, environment and flags; flags are read from the context."""
    from ...worker.main import exit_at_once, run_worker

    log_to_stderr(log_level)
    settings = load_settings(config, context=context)
    run_worker(settings.worker(), settings.engine())
    exit_at_once()


def _worker_flags() -> list[Any]:
    """--redis and --pool as everywhere; what a file may say instead is not required."""
    shared = {"redis": given("redis", RedisUrl, None, DEFAULT_URL), "pool": given("pool", Pool, None, "default")}
    flags = {name: one.flag for name, one in worker_flags().items()}
    model = given("model", str | None, typer.Option(help=flags.pop("model").help), None)
    return [model, *(shared.get(name) or parameter(flag) for name, flag in flags.items())]


worker = derived(
    _worker,
    [
        given("context", typer.Context),
        given("config", Path | None, typer.Option(help="YAML, TOML or JSON; flags win over it."), None),
        *_worker_flags(),
        given("log_level", LogLevel, None, "info"),
    ],
    "Serve a pool with one SGLang engine until SIGTERM or Ctrl-C. Then it drains and leaves.",
)
