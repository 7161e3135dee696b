"""`rolloutmq ops`: long operator work as jobs of RQ."""

from __future__ import annotations

import json as json_module
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...messages.errors import ConfigError
from ...messages.redis import DEFAULT_URL
from ..flags import parse_extra
from ..operations import run_here
from ..operations.catalog import checked, operations
from ..redis import reach
from ..terminal import ProgressLine, printable
from .options import Json, LogLevel, Pool, RedisUrl, group, log_to_stderr, period, say, seconds

if TYPE_CHECKING:
    from ..operations.rq_queue import OperationQueue, OperationRun

app = group("Run long operator work in the background.")

OpsRedis = Annotated[
    str | None,
    typer.Option(envvar="ROLLOUTMQ_OPS_REDIS", help="Redis for the operations' own queue; default: the pool's."),
]
Wait = Annotated[float | None, seconds("Seconds to wait at most; default: until it is over.")]
LOOK_S = 0.2


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the operation; `ops list` shows them.")],
    param: Annotated[list[str] | None, typer.Option(help="A parameter, NAME=VALUE; repeatable.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    ops_redis: OpsRedis = None,
    pool: Pool = "default",
    wait: Annotated[bool, typer.Option("--wait", help="Show progress until it is over, then the result.")] = False,
    timeout: Wait = None,
    here: Annotated[bool, typer.Option("--here", help="In this process, without RQ and a worker.")] = False,
    once_per: Annotated[
        str | None, typer.Option(help="Not if the same was submitted in this slot of time: 30m, 1h, 1d. For schedules.")
    ] = None,
    json: Json = False,
) -> None:
    """Submit an operation and print its id. With --wait: exit code 1 if it failed or found trouble.

    \b
    rolloutmq ops run audit-broker --wait
    rolloutmq ops run dead-requeue --param cause="was lost"
    rolloutmq ops run audit-broker --once-per 1h
    """
    params = parse_extra(param or [])
    if here and once_per is not None:
        raise ConfigError("--once-per: not together with --here, which submits nothing")
    checked(name, params)  # before anything is connected to
    if here:
        reach(redis, pool)
        raise typer.Exit(_say_result(name, run_here(name, params, redis, pool)))
    with _queue(ops_redis or redis, pool) as queue:
        run_id = queue.submit(name, params, None if once_per is None else period("--once-per", once_per))
        if not wait:
            say({"id": run_id}, [run_id], json)
            _tell_if_nobody_runs(queue)
            return
        typer.secho(f"operation {run_id}", err=True)
        raise typer.Exit(_follow(queue, run_id, timeout))


@app.command()
def watch(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="As `ops run` printed it.")],
    redis: RedisUrl = DEFAULT_URL,
    ops_redis: OpsRedis = None,
    pool: Pool = "default",
    timeout: Wait = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of text: the result is JSON anyway.")] = False,
) -> None:
    """Show an operation's progress until it is over, then its result. Exit code 1 if it failed or found trouble."""
    with _queue(ops_redis or redis, pool) as queue:
        raise typer.Exit(_follow(queue, run_id, timeout))


@app.command()
def cancel(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="As `ops run` printed it.")],
    redis: RedisUrl = DEFAULT_URL,
    ops_redis: OpsRedis = None,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """Cancel an operation. One that is queued is not run, one that runs is stopped. Exit code 1 if it was over."""
    with _queue(ops_redis or redis, pool) as queue:
        before = queue.cancel(run_id)
    told = {"started": "it ends within seconds: rolloutmq ops watch " + run_id}.get(before.state, "cancelled")
    told = f"was {before.state}" if before.over else told
    say({"id": run_id, "was": before.state}, [f"{run_id} {told}"], json)
    raise typer.Exit(int(before.over))


@app.command("list")
def list_operations(
    redis: RedisUrl = DEFAULT_URL, ops_redis: OpsRedis = None, pool: Pool = "default", json: Json = False
) -> None:
    """List the operations that there are, and their runs: queued, under way, or ended within the last days."""
    kinds: list[dict[str, Any]] = [
        {"name": name, "help": kind.help, "params": _described(kind.params.model_json_schema())}
        for name, kind in operations().items()
    ]
    with _queue(ops_redis or redis, pool) as queue:
        runs = queue.runs()
    lines: list[str] = []
    for kind in kinds:
        lines.append(f"{kind['name']:16}{kind['help']}")
        lines += [f"{'':16}  {param}: {allowed}" for param, allowed in kind["params"].items()]
    lines += [f"{run.id}  {run.operation:16}{run.state:10}{_progress(run)}" for run in runs]
    say({"operations": kinds, "runs": [asdict(run) for run in runs]}, lines, json)


@app.command()
def worker(
    redis: RedisUrl = DEFAULT_URL,
    ops_redis: OpsRedis = None,
    pool: Pool = "default",
    burst: Annotated[bool, typer.Option(help="Run what is queued, then end.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run a pool's operations, one at a time, until SIGTERM or Ctrl-C (the one under way is finished first)."""
    log_to_stderr(log_level)
    with _queue(ops_redis or redis, pool, patient=True) as queue:
        from ..operations.rq_queue import OperationWorker

        operations()
        OperationWorker(queue.redis, redis, pool).work(burst=burst, logging_level=None)


def _queue(redis_url: str, pool: str, **how: bool) -> OperationQueue:
    from ..operations.rq_queue import OperationQueue

    queue = OperationQueue(redis_url, pool, **how)
    reach(redis_url, pool)  # not one of the pool's later servers, where nobody would look
    return queue


def _tell_if_nobody_runs(queue: OperationQueue) -> bool:
    """Say on stderr that what is queued waits for a worker, if there is none."""
    if lonely := not queue.has_worker():
        told = "nobody runs this pool's operations: it waits until you start  rolloutmq ops worker"
        typer.secho(told, fg="yellow", err=True)
    return lonely


def _follow(queue: OperationQueue, run_id: str, timeout: float | None) -> int:
    deadline = None if timeout is None else time.monotonic() + timeout
    lonely = False
    with ProgressLine() as line:
        while not (run := queue.run(run_id)).over:
            if run.state == "queued" and not lonely:
                lonely = _tell_if_nobody_runs(queue)
            if deadline is not None and time.monotonic() >= deadline:
                typer.secho(f"still {run.state}; it continues: rolloutmq ops watch {run_id}", err=True)
                return 3
            line.show(run.done, run.total, f"{run.state}: {run.message}" if run.message else run.state)
            time.sleep(LOOK_S)
    if run.state != "finished":
        typer.secho(f"{run.state}: {printable(run.error)}" if run.error else run.state, fg="red", err=True)
        return 1
    return _say_result(run.operation, run.result)


def _say_result(name: str, result: dict[str, Any] | None) -> int:
    typer.echo(json_module.dumps(result))
    kind = operations().get(name)
    return int(kind is not None and result is not None and kind.found_trouble(result))


def _progress(run: OperationRun) -> str:
    if run.error:
        return run.error
    return f"{run.done} of {run.total}  {run.message}" if run.total is not None else f"{run.done}  {run.message}"


def _described(schema: dict[str, Any]) -> dict[str, str]:
    """For each parameter, its type and default in a few words."""
    said: dict[str, str] = {}
    for name, field in schema.get("properties", {}).items():
        kinds = [one.get("type", "") for one in field.get("anyOf", [field])]
        default = "" if field.get("default") in (None, "") else f", default {field['default']}"
        said[name] = " or ".join(kind for kind in kinds if kind != "null") + default
    return said
