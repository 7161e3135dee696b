"""`rolloutmq scale` and `rolloutmq up`: as many workers as a pool needs, or a whole pool."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...messages.defaults import DEFAULT_URL
from .options import LogLevel, Pool, RedisUrl, Stabilise, StartTakes, Target, log_to_stderr, say, seconds
from .sites import Logs, On, Template, entries, folder_of, workers_of

if TYPE_CHECKING:
    from ...producer.diagnosis import Reason
    from ..metrics import Exporter
    from ..redis import EmbeddedRedis
    from ..scale import Decision, Means, Place, PoolView, Scaler, ScaleSettings

log = logging.getLogger(__name__)
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
EXPLAIN_S = 2.0
"""Seconds between the two looks of --explain."""
LOOK_S = 0.5
"""Seconds between two looks at the server of `rolloutmq up`."""
GATEWAY_LEAVES_S = 10.0
scale = typer.Typer(add_completion=False, rich_markup_mode=None)
up = typer.Typer(add_completion=False, rich_markup_mode=None)


@scale.command("scale", context_settings=PASSES_ON)
def _scale(
    context: typer.Context,
    least: Annotated[int, typer.Option("--min", min=0, help="Workers that always run.")] = 0,
    most: Annotated[int, typer.Option("--max", min=0, help="Workers that run at most.")] = 4,
    gpus: Annotated[str, typer.Option(help="A GPU for each worker: 0,1,2,3; or several: 0+1,2+3.")] = "",
    on: On = "host",
    template: Template = None,
    target: Target = 60.0,
    stabilise: Stabilise = 300.0,
    startup: StartTakes = 60.0,
    ready_within: Annotated[float, seconds("Seconds in which a worker must serve, or has failed.", 1.0)] = 1800.0,
    every: Annotated[float, seconds("Seconds between two looks.", 0.1)] = 2.0,
    explain: Annotated[bool, typer.Option("--explain", help="Only say what the pool needs, and why.")] = False,
    logs: Logs = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Annotated[bool, typer.Option("--json", help="With --explain: JSON instead of text.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Start and drain workers, as many as the pool needs. Further flags are those of `rolloutmq worker`.

    \b
    rolloutmq scale --min 0 --max 4 --gpus 0,1,2,3 --model Qwen/Qwen3-8B
    rolloutmq scale --on slurm --template worker.sbatch --max 16 --model Qwen/Qwen3-8B
    rolloutmq scale --explain
    """
    from ..scale import ScaleSettings, places

    if least > most:
        raise typer.BadParameter(f"--min {least} is more than --max {most}.")
    if json and not explain:
        raise typer.BadParameter("--json is for --explain.")
    settings = ScaleSettings(least, most, target, stabilise, startup)
    flags = context.args
    if explain:
        if flags:
            raise typer.BadParameter(f"--explain takes no flags of workers: {' '.join(flags)}")
        decision, view, waits = asyncio.run(_explain(redis, pool, settings))
        state = {"pool": asdict(view) if view is not None else None, "reasons": [asdict(reason) for reason in waits]}
        say(asdict(decision) | state, [*_lines(decision, view), *(f"why jobs wait: {it.told()}" for it in waits)], json)
        return
    log_to_stderr(log_level)
    free = places(most, entries(gpus, on))
    workers = workers_of(flags, redis, pool, most, on=on, template=template)
    with folder_of(logs) as folder:
        means = workers.means(folder, redis, pool, every_s=every, ready_s=ready_within)
        asyncio.run(_scale_until_stopped(redis, pool, settings, means, free))


@up.command("up", context_settings=PASSES_ON)
def _up(
    context: typer.Context,
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 1,
    gpus: Annotated[str, typer.Option(help="A GPU for each worker: 0,1; or several: 0+1,2+3.")] = "",
    on: On = "host",
    template: Template = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Of Redis, on 127.0.0.1, with --on slurm on all addresses; 0 picks a free one."
        ),
    ] = 6379,
    directory: Annotated[Path | None, typer.Option(help="Keep Redis' data here, with an append-only file.")] = None,
    exporter_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the metrics, on 127.0.0.1; 0 picks a free one.")
    ] = 9477,
    gateway_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of OpenAI's API, on 127.0.0.1; 0 picks a free one.")
    ] = 8000,
    logs: Logs = None,
    pool: Pool = "default",
    json: Annotated[bool, typer.Option("--json", help="Print where everything is as one line of JSON.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run a whole pool until Ctrl-C. Further flags are those of `rolloutmq worker`.

    \b
    rolloutmq up --model Qwen/Qwen3-0.6B --workers 2
    """
    from ..files import check_out
    from ..redis import EmbeddedRedis
    from ..scale import ScaleSettings, places

    if directory is not None:
        check_out("--directory", directory, folder=True)
    log_to_stderr(log_level)
    free = places(workers, entries(gpus, on))
    started = workers_of(context.args, DEFAULT_URL, pool, workers, on=on, template=template)
    saved, host = directory is not None, None if on == "host" else socket.gethostname()
    with (
        folder_of(logs) as folder,
        EmbeddedRedis(port=port or None, host=host, directory=directory, appendonly=saved) as server,
        _metrics(server.url, pool, exporter_port) as (exporter, metrics),
    ):
        gateway = _gateway_command(gateway_port, folder)
        file = _saved(server.url, folder) if host is not None else None
        where = {"redis": server.url} if file is None else {"redis URL": str(file)}
        found = where | {"openai": gateway.where, "metrics": metrics, "logs": str(folder)}
        lines = [f"{name:9} {where}" for name, where in found.items()]
        jobs = "; jobs are kept" if saved else " and deletes the jobs"
        say(found, [*lines, f"starting {workers} of `rolloutmq worker`; Ctrl-C ends everything{jobs}"], json)
        means = started.means(folder, server.url, pool)
        settings = ScaleSettings(workers, workers)

        async def beside(scaler: Scaler) -> None:
            lines = (
                [] if json else _ready_lines(workers, server.url if file is None else f"$(cat {file})", gateway.where)
            )
            async with gateway.running({"ROLLOUTMQ_REDIS": server.url, "ROLLOUTMQ_POOL": pool}):
                await _ready(scaler, exporter, lines, server)

        asyncio.run(_scale_until_stopped(server.url, pool, settings, means, free, beside))


async def _scale_until_stopped(
    redis_url: str,
    pool: str,
    settings: ScaleSettings,
    means: Means,
    free: list[Place],
    beside: Callable[[Scaler], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Scale until SIGTERM or SIGINT, and wait until the workers have left; a second signal kills them."""
    from redis.exceptions import RedisError

    from ..metrics import PoolWatch
    from ..redis import connected
    from ..scale import LOCK_S, Scaler, ScalerLock

    async with connected(redis_url, pool) as redis:
        lock = ScalerLock(redis, pool, max(LOCK_S, 3 * means.every_s))
        await lock.take()
        scaler = Scaler(settings, means, free, PoolWatch(redis, pool), lock)
        scaling = asyncio.create_task(scaler.run())
        told = asyncio.create_task(beside(scaler)) if beside is not None else None
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, scaler.stop)
        try:
            if told is not None:  # it ends only with an error
                await asyncio.wait([scaling, told], return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    scaler.stop()
            with suppress(asyncio.CancelledError):
                await scaling
            if told is not None and told.done():
                told.result()
        finally:
            if told is not None:
                told.cancel()
            with suppress(RedisError, OSError):
                await lock.release()


async def _explain(
    redis_url: str, pool: str, settings: ScaleSettings
) -> tuple[Decision, PoolView | None, list[Reason]]:
    from ...messages.broker import broker_of
    from ...producer.diagnosis import why
    from ..metrics import PoolWatch
    from ..redis import connected
    from ..scale import History, decide

    async with connected(redis_url, pool) as redis:
        watch = PoolWatch(redis, pool)
        await watch.look()
        await asyncio.sleep(EXPLAIN_S)
        view = await watch.look()
        waits = [reason for reason in await why(broker_of(redis, pool)) if reason.stops]
        return decide(view, settings, History())[0], view, waits


def _lines(decision: Decision, view: PoolView | None) -> Iterator[str]:
    yield f"{decision.state}: {decision.wanted} workers wanted"
    yield decision.why
    if view is None:
        return
    work_s, rate = view.work_s, view.worker_tokens_per_s
    takes = "" if work_s is None else f": {work_s:.0f} s of work for one worker"
    full = "of a full worker not measured yet" if rate is None else f"{rate:,.0f} of a full worker"
    yield f"workers      {view.serving} serve, {view.starting} start, {view.draining} drain, {view.paused} are paused"
    yield f"queue        {view.queued:.0f} samples{takes}; {view.held_back:.0f} more wait for newer weights"
    yield f"slots        {view.running:.0f} of {view.slots:.0f} taken"
    yield f"tokens/s     {view.tokens_per_s:,.0f} now, {full}"
    yield f"trainer      {_every(view.version_s)}, staleness {'any' if view.eta is None else f'at most {view.eta}'}"
    yield f"window       {decision.window_s:.0f} s without need before a worker leaves"


def _every(version_s: float | None) -> str:
    return "no two versions were seen" if version_s is None else f"a version every {version_s:.0f} s"


@contextmanager
def _metrics(redis_url: str, pool: str, port: int) -> Iterator[tuple[Exporter | None, str]]:
    """Serve the pool's metrics; where, or why not."""
    try:
        from ..metrics import Exporter, served
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        yield None, "none: pip install 'rolloutmq[metrics]'"
        return
    exporter = Exporter(redis_url, pool, 5.0)
    with served(exporter, "127.0.0.1", port) as found:
        yield exporter, f"http://127.0.0.1:{found}/metrics"


@dataclass(frozen=True, slots=True)
class _Beside:
    """The gateway of `up`, in a process of its own. command: None if its libraries are not installed."""

    where: str
    command: list[str] | None
    log: Path

    @asynccontextmanager
    async def running(self, environment: Mapping[str, str]) -> AsyncIterator[None]:
        """It runs inside the block. If it ends by itself the log says so, and the rest goes on."""
        if self.command is None:
            yield
            return
        with self.log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *self.command, stdout=out, stderr=out, env={**os.environ, **environment}, start_new_session=True
            )
        told = asyncio.create_task(self._tell(process))
        try:
            yield
        finally:
            told.cancel()
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # SIGTERM would wait for balancers first
            await process.wait()

    async def _tell(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        last = self.log.read_text(errors="replace").splitlines()[-3:]
        log.error("the gateway ended with exit code %s: %s", code, " | ".join(last))


def _gateway_command(port: int, folder: Path) -> _Beside:
    from ...messages.errors import ConfigError
    from ..scale import leaving_with_this

    if not all(find_spec(name) for name in ("starlette", "uvicorn", "sse_starlette", "orjson")):
        return _Beside("none: pip install 'rolloutmq[gateway]'", None, folder)
    try:
        with socket.create_server(("127.0.0.1", port)) as taken:
            port = taken.getsockname()[1]
    except OSError as error:
        raise ConfigError(f"--gateway-port {port}: {error.strerror}; 0 picks a free one") from None
    command = [sys.executable, "-m", "rolloutmq.ops.entry", "gateway", "--port", str(port)]
    return _Beside(f"http://127.0.0.1:{port}/v1", leaving_with_this(command, GATEWAY_LEAVES_S), folder / "gateway.log")


def _saved(url: str, folder: Path) -> Path:
    """The file of the URL, which has a password."""
    file = folder.absolute() / "redis-url"
    with open(file, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        out.write(url)
    return file


def _ready_lines(workers: int, url: str, gateway: str) -> Iterator[str]:
    yield f"ready: {workers} serve. In another terminal:"
    yield f"  export ROLLOUTMQ_REDIS={url}"
    yield '  rolloutmq generate "Once upon a time"'
    yield "  rolloutmq top"
    yield 'In Python: BlockingRolloutClient(os.environ["ROLLOUTMQ_REDIS"]), as in examples/trainer.py'
    if gateway.startswith("http"):
        yield f'           OpenAI(base_url="{gateway}", api_key="none"), as in examples/agent_openai.py'


async def _ready(scaler: Scaler, exporter: Exporter | None, lines: Iterable[str], server: EmbeddedRedis) -> None:
    """Look at the pool for the metrics; when the workers serve, say how to use them.

    Raises ConfigError when the server has ended.
    """
    from ...messages.errors import ConfigError

    looking = asyncio.create_task(exporter.run()) if exporter is not None else None
    try:
        while server.running:
            if scaler.least_serve.is_set():
                for line in lines:
                    typer.echo(line)
                lines = ()
            await asyncio.sleep(LOOK_S)
        raise ConfigError("the pool's Redis has ended, and with it the pool")
    finally:
        if looking is not None:
            looking.cancel()
