"""`rolloutmq status`, `top`, `doctor`, `submit`, `cancel` and `replies`: a pool as its users see it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ...messages.defaults import DEFAULT_URL
from .options import (
    Json,
    LogLevel,
    Pool,
    RedisUrl,
    Stabilise,
    StartTakes,
    Target,
    Yes,
    log_to_stderr,
    say,
    seconds,
)

if TYPE_CHECKING:
    from ...messages.broker import Broker


def status(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    startup: Annotated[
        bool, typer.Option("--startup", help="How long the start of each worker took, by phase.")
    ] = False,
    json: Json = False,
) -> None:
    """Show the queue, the workers and the weights they serve."""
    from ..status import pool_state, startup_lines, status_lines

    state = asyncio.run(pool_state(redis, pool))
    if startup:
        told = [{name: one[name] for name in ("worker_id", "host", "startup")} for one in state["workers"]]
        say(told, startup_lines(state), json)
        return
    say(state, status_lines(state), json)


def top(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    every: Annotated[float, seconds("Seconds between two looks.", 0.2, 3600.0)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture, and end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the figures once, as JSON.")] = False,
) -> None:
    """Watch a pool live: its queue, workers, versions and speed. Arrows and enter open a worker and a job, q ends."""
    import logging
    import sys

    from ..top import figures, watch

    if once or json or not sys.stdout.isatty():
        state, picture = asyncio.run(figures(redis, pool, every))
        say(state, (line.plain.rstrip() for line in picture), json)
        return
    logging.basicConfig(handlers=[logging.NullHandler()])  # a warning would be written across the picture
    asyncio.run(watch(redis, pool, every))


def exporter(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 9477,
    host: Annotated[str, typer.Option(help="Address to listen on; 127.0.0.1 for this host alone.")] = "0.0.0.0",
    every: Annotated[float, seconds("Seconds between two looks at the pool.", 1.0, 300.0)] = 5.0,
    target: Target = 60.0,
    stabilise: Stabilise = 300.0,
    startup: StartTakes = 60.0,
    deletion_costs: Annotated[
        bool, typer.Option("--deletion-costs", help="In a pod: tell Kubernetes which workers cost least to delete.")
    ] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve the pool's metrics for Prometheus. One exporter for each pool, until SIGTERM or Ctrl-C.

    \b
    rolloutmq exporter --pool default --port 9477
    curl http://127.0.0.1:9477/metrics
    """
    from ..metrics import run_exporter
    from ..scale import ScaleSettings

    log_to_stderr(log_level)
    scale = ScaleSettings(most=1_000_000, target_s=target, stabilise_s=stabilise, startup_s=startup)
    run_exporter(redis, pool, host, port, every, deletion_costs=deletion_costs, scale=scale)


def doctor(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    disk: Annotated[
        list[Path] | None, typer.Option(help="A folder whose disk counts: snapshots, journal; repeatable.")
    ] = None,
    reach: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a trainer's rendezvous store to reach; repeatable.")
    ] = None,
    json: Json = False,
) -> None:
    """Check Redis and this host, and say what to do. Exit code 1 if there is a problem."""
    from dataclasses import asdict

    from ..doctor import examine, lines

    findings = asyncio.run(examine(redis, pool, disk or [], reach or []))
    say([asdict(finding) for finding in findings], lines(findings), json)
    raise typer.Exit(int(any(finding.level == "problem" for finding in findings)))


def submit(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="JSONL: a job per line, with text, messages or token_ids.", exists=True),
    ],
    out: Annotated[Path, typer.Option(help="JSONL of results, in the order of the input.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    n: Annotated[int, typer.Option(help="Samples per line, unless the line has its own.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of a sample, unless the line has its own.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; unless the line has its own.")] = 1.0,
    window: Annotated[int, typer.Option(min=1, help="Jobs outstanding at a time.")] = 1024,
    logprobs: Annotated[bool, typer.Option(help="Write the logprob of every token.")] = False,
    lora: Annotated[str | None, typer.Option(help="LoRA adapter to sample with, unless the line has its own.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a finished output file.")] = False,
    json: Json = False,
) -> None:
    """Answer every line of a file exactly once. After Ctrl-C the same command continues where it was.

    \b
    rolloutmq submit prompts.jsonl --out answers.jsonl --n 4 --max-new-tokens 256
    """
    from ..submit import Defaults, submit_file

    log_to_stderr("warning")
    defaults = Defaults(n=n, max_new_tokens=max_new_tokens, temperature=temperature, logprobs=logprobs, lora=lora)
    code = submit_file(file, out, redis, pool, defaults, window=window, overwrite=overwrite, as_json=json)
    raise typer.Exit(code)


def cancel(
    jobs: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Job ids.")] = None,
    client: Annotated[str, typer.Option(help="Instead of ids: every open job of this client.")] = "",
    group: Annotated[str, typer.Option(help="With --client: only the jobs of this group.")] = "",
    partial: Annotated[
        bool, typer.Option("--partial", help="With job ids: publish what their samples have so far.")
    ] = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """Cancel jobs, queued or running. Their clients are told. Samples that were published stay.

    \b
    rolloutmq cancel 0192f0c1a2b34c5d8e9fa0b1c2d3e4f5
    rolloutmq cancel --client trainer-1 --group step-7
    """
    from ...messages.errors import ConfigError, InvalidField
    from ...messages.ids import is_id
    from ..redis import ask

    if bool(jobs) == bool(client) or (group and not client) or (partial and client):
        raise ConfigError("give job ids (and --partial), or --client, or --client and --group")
    for job in jobs or []:
        if not is_id(job):
            raise InvalidField("job", job, "32 lower-case hex digits")
    cause = "cancelled by an operator"
    if client:
        count = ask(redis, pool, lambda broker: broker.cancel_client(client, group or None, cause))
        say({"cancelled": count}, [f"cancelled {count} jobs"], json)
        return

    async def end(broker: Broker) -> list[str]:
        return await (broker.stop if partial else broker.cancel)(jobs or [], cause)

    states = ask(redis, pool, end)
    said = {"ok": "stopped" if partial else "cancelled", "unbegun": "cancelled"}
    became = {job: said.get(state, f"was {state}") for job, state in zip(jobs or [], states, strict=True)}
    say(became, [f"{job} {what}" for job, what in became.items()], json)
    if not said.keys() & set(states):
        raise typer.Exit(1)


def replies(
    do: Annotated[Literal["list", "drop"], typer.Argument(metavar="ACTION", help="list or drop.")] = "list",
    client: Annotated[
        str | None, typer.Argument(metavar="CLIENT", help="To drop: id of the client that will not come back.")
    ] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """List or drop results that wait for their clients. The client with most of them comes first.

    The open jobs of a client continue when its results are dropped: cancel them first.

    \b
    rolloutmq replies list
    rolloutmq replies drop trainer-1
    """
    from ...messages.errors import ConfigError
    from ..redis import ask

    if (client is None) != (do == "list"):
        raise ConfigError("give the client with drop, and with nothing else")

    async def read(broker: Broker) -> list[dict[str, Any]]:
        found = [
            {
                "client": one,
                "bytes": nbytes,
                "results": await broker.count_replies(one),
                "open_jobs": len(await broker.open_jobs(one)),
            }
            for one, nbytes in (await broker.unread()).items()
        ]
        return sorted(found, key=lambda row: -row["bytes"])

    if client is None:
        line = "{client}  {results:,} results  {bytes:,} bytes  {open_jobs:,} jobs open".format_map
        rows = ask(redis, pool, read)
        say(rows, map(line, rows) if rows else ["no results wait"], json)
        return
    count = ask(redis, pool, lambda broker: broker.count_replies(client))
    if count and not yes:
        typer.confirm(f"throw away {count} results of {client}?", abort=True, err=True)
    dropped = ask(redis, pool, lambda broker: broker.drop_replies(client))
    say({"dropped": dropped}, [f"dropped {dropped} results"], json)
