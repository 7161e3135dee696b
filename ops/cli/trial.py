"""Commands that need no pool: a Redis, the tiny model, the demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files import check_out, writing
from .options import Json, say


def redis(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free one.")] = 6379,
    directory: Annotated[Path | None, typer.Option(help="Keep data here, with an append-only file.")] = None,
    json: Json = False,
) -> None:
    """Run an embedded redis-server on this machine until Ctrl-C. For laptops and trials."""
    import signal

    from ..redis import EmbeddedRedis

    if directory is not None:
        check_out("--directory", directory, folder=True)
    saved = directory is not None
    with EmbeddedRedis(port=port or None, directory=directory, appendonly=saved) as server:
        say({"url": server.url}, [server.url], json)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


def tiny_model(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Folder to write it to.")], json: Json = False
) -> None:
    """Write a tiny random Qwen2-style model and its tokenizer. It is for trying a worker offline.

    \b
    rolloutmq tiny-model out/tiny && rolloutmq worker --model out/tiny
    """
    check_out("DIRECTORY", directory, folder=True)
    from ..tiny_model import write_tiny_model

    with writing("DIRECTORY", directory):
        write_tiny_model(directory)
    say({"directory": str(directory)}, [f"wrote {directory}: rolloutmq worker --model {directory}"], json)


def demo(
    out: Annotated[Path, typer.Option(help="Where summary.json and report.png go.")] = Path("out/demo"),
    training_steps: Annotated[
        int | None, typer.Option(min=1, help="Default: as many as the reward needs to reach its goal.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, help="Of the task, the model and the trainer.")] = 0,
    gpus: Annotated[bool, typer.Option("--on-gpus", help="Train on the first GPU, serve on the others.")] = False,
    json: Json = False,
) -> None:
    """Run asynchronous RL here, while workers die and join. A trainer learns from what a pool generates."""
    check_out("--out", out, folder=True)
    from ..demo import run_demo

    raise typer.Exit(run_demo(out, steps=training_steps, seed=seed, gpus=gpus, as_json=json))
