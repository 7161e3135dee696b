"""Commands that run something on this machine: a worker, a Redis, the demo; and the tiny model to try them with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...messages.redis import DEFAULT_URL
from ..config import load_settings, worker_flags
from .options import Json, LogLevel, Pool, RedisUrl, derived, given, log_to_stderr, parameter, plain_errors, say


def _worker(context: typer.Context, config: Path | None, log_level: str, **_: Any) -> None:
    """Serve with the settings of file, environment and flags; flags are read from the context."""
    from ...worker.main import exit_at_once, run_worker

    log_to_stderr(log_level)
    with plain_errors():
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


def redis(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0 picks a free one.")] = 6379,
    directory: Annotated[Path | None, typer.Option(help="Keep data here, with an append-only file.")] = None,
    json: Json = False,
) -> None:
    """Run an embedded redis-server on this machine until Ctrl-C. For laptops and trials."""
    import signal

    from ..redis import EmbeddedRedis

    saved = directory is not None
    with plain_errors(), EmbeddedRedis(port=port or None, directory=directory, appendonly=saved) as server:
        say({"url": server.url}, [server.url], json)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


def tiny_model(directory: Annotated[Path, typer.Argument(help="Where to write it.")], json: Json = False) -> None:
    """Write a tiny random Qwen2-style model and its tokenizer. It is something to try a worker with, offline."""
    from ..tiny_model import write_tiny_model

    write_tiny_model(directory)
    say({"directory": str(directory)}, [f"wrote {directory}: rolloutmq worker --model {directory}"], json)


def demo(
    out: Annotated[Path, typer.Option(help="Where summary.json and report.png go.")] = Path("out/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps; default: as many as the demo needs.")] = None,
    seed: Annotated[int, typer.Option(help="Of the task, the model and the trainer.")] = 0,
    gpus: Annotated[bool, typer.Option("--gpus", help="Train on the first GPU, serve on the others.")] = False,
    json: Json = False,
) -> None:
    """Asynchronous RL on this machine, while workers die and join. A trainer learns from what a pool generates."""
    from ..demo import run_demo

    raise typer.Exit(run_demo(out, steps=steps, seed=seed, gpus=gpus, as_json=json))
