"""Commands that need no pool: a Redis, the tiny model, the demo, simulations, a trainer's books."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files import check_out, writing
from .options import Json, group, ids, say


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


def books(
    file: Annotated[
        Path,
        typer.Argument(
            help="A feed's state_dict as JSON, a checkpoint of torch.save with one, or the folder of TRL's."
        ),
    ],
    json: Json = False,
) -> None:
    """Show what became of a trainer's samples, from a checkpoint.

    Each was trained, dropped for a reason, or is in flight. Lengths and rewards of what was dropped stand beside those
    of what was trained.
    """
    from ..books import books_lines, read_books

    found = read_books("FILE", file)
    say(found.report(), books_lines(found), json)


simulate = group("Compute what settings would cost, without a pool.")


@simulate.callback()
def _has_commands() -> None:
    """Compute what settings would cost, without a pool."""  # a group of one command would be that command


@simulate.command()
def staleness(
    etas: Annotated[str, typer.Option(help="Bounds to compare, with commas.")] = "0,1,2,4,8",
    scenario: Annotated[
        str, typer.Option(help="balanced, slow-trainer, slow-pool, heavy-tail, or all of them.")
    ] = "all",
    on_stale: Annotated[str, typer.Option(help="drop, mark or wait.")] = "drop",
    training_steps: Annotated[int, typer.Option(min=2, max=100_000, help="Of each run.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths.")] = 0,
    slots: Annotated[int | None, typer.Option(help="Samples that the pool generates at once.")] = None,
    tokens_per_s: Annotated[float | None, typer.Option(help="Of one sample.")] = None,
    median_tokens: Annotated[int | None, typer.Option(help="Median length of a sample.")] = None,
    tail: Annotated[float | None, typer.Option(help="Sigma of the lengths' log-normal distribution.")] = None,
    step_s: Annotated[float | None, typer.Option(help="Seconds of training on one batch.")] = None,
    sync_s: Annotated[float | None, typer.Option(help="Seconds without generation at an update.")] = None,
    transfer_s: Annotated[float | None, typer.Option(help="Seconds from an update until the pool has it.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of a step.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of a prompt.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG here; needs the extra `demo`.")] = None,
    json: Json = False,
) -> None:
    """Throughput, idle time and staleness against the bound eta, for slow trainers, slow pools and long samples."""
    from dataclasses import replace

    from ...messages.errors import InvalidField
    from ..simulate import SHAPES, as_lines, as_state, draw, sweep

    if plot is not None:
        check_out("--plot", plot)
    if scenario not in (*SHAPES, "all"):
        raise InvalidField("--scenario", scenario, f"all, or one of {', '.join(SHAPES)}")
    bounds = ids("--etas", etas, "bounds such as 0,1,4")
    own = {
        "slots": slots,
        "tokens_per_s": tokens_per_s,
        "tokens": median_tokens,
        "tail": tail,
        "step_s": step_s,
        "sync_s": sync_s,
        "transfer_s": transfer_s,
        "batch_size": batch_size,
        "group": samples,
    }
    given = {name: value for name, value in own.items() if value is not None}
    shapes = {
        name: replace(shape, **given)  # type: ignore[arg-type]
        for name, shape in SHAPES.items()
        if scenario in (name, "all")
    }
    found = {name: sweep(shape, bounds, on_stale, training_steps, seed) for name, shape in shapes.items()}
    if plot is not None:
        with writing("--plot", plot):
            plot.parent.mkdir(parents=True, exist_ok=True)
            draw(plot, found, f"on_stale={on_stale}, {training_steps} steps, seed {seed}")
    say(as_state(shapes, found, on_stale=on_stale, steps=training_steps, seed=seed), as_lines(found), json)
