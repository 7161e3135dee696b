"""`rolloutmq bench queue`, in a file of its own: cli.py registers it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..messages.errors import ConfigError
from .cli_errors import plain_errors


def bench_queue(
    peers: Annotated[str, typer.Option(help="Measured beside it: some of rq,arq,taskiq; or none.")] = "rq,arq,taskiq",
    rounds: Annotated[int, typer.Option(help="Turns of each system; the median counts.", min=1)] = 5,
    seconds: Annotated[float, typer.Option(help="Length of a turn, after a quarter of it to warm up.", min=0.1)] = 5.0,
    workers: Annotated[str, typer.Option(help="Simulated workers for the growth of Redis' costs.")] = "1,10,100,1000",
    lifecycles: Annotated[int, typer.Option(help="Jobs measured at each number of workers.", min=16)] = 8192,
    out: Annotated[Path | None, typer.Option(help="Write the result here, too.")] = None,
    cache: Annotated[Path, typer.Option(help="Where peers' environments are made.")] = Path("out/bench-peers"),
    json: Annotated[bool, typer.Option("--json", help="Nothing but the last line.")] = False,
) -> None:
    """Jobs/s, latency, large payloads and Redis' CPU per job, beside RQ, arq, taskiq and the bare scripts."""
    from .bench.queue_bench import Plan, run_queue_bench
    from .bench.queue_environments import parse_peers

    with plain_errors():
        try:
            counts = tuple(int(count) for count in workers.split(","))
        except ValueError:
            raise ConfigError(f"--workers {workers!r}: numbers with commas between them, such as 1,10,100") from None
        if min(counts) < 1:
            raise ConfigError(f"--workers {workers!r}: at least 1 each")
        plan = Plan(parse_peers(peers), rounds, seconds, counts, lifecycles, cache, out)
        run_queue_bench(plan, quiet=json)
