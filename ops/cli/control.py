"""`rolloutmq control`: things said to workers, and what each of them answered."""

from __future__ import annotations

import asyncio
import json as json_module
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from ...messages.redis import DEFAULT_URL
from ...producer.control import Answers, PoolAudit, PoolControl
from ..terminal import printable
from .errors import plain_errors
from .options import Pool, RedisUrl

app = typer.Typer(
    help="Tell workers to do something, and wait for each one's answer. Exit code 1 if one did not do it.",
    no_args_is_help=True,
)
Worker = Annotated[str, typer.Option("--worker", help="Id of the worker; default: all that are alive.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")]
Tags = Annotated[list[str] | None, typer.Option("--tag", help="weights, kv_cache or cuda_graph; repeatable.")]
HandBack = Annotated[bool, typer.Option("--hand-back", help="Give what was running to other workers.")]
Upload = Annotated[str, typer.Option(help="URL to copy the files to: file://, s3://, gs://, … (fsspec).")]
T = TypeVar("T")


def _timeout(seconds: float) -> Any:
    return typer.Option(seconds, "--timeout", min=0.1, help="Seconds to wait for answers.")


@app.command()
def version(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(10.0),
    json: Json = False,
) -> None:
    """Which version each worker serves, and in which state it is."""
    _say(redis, pool, lambda to: to.version(worker_id=worker, timeout=timeout), json)


@app.command()
def pause(
    mode: Annotated[str, typer.Option(help="finish, abort, retract or in_place.")] = "abort",
    hand_back: HandBack = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(60.0),
    json: Json = False,
) -> None:
    """Stop generating; what runs is finished, interrupted, or frozen with its KV. `resume` goes on."""
    params = {"mode": mode, "hand_back": hand_back}
    _say(redis, pool, lambda to: to.send("pause", params, worker_id=worker, timeout=timeout), json)


@app.command()
def resume(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(30.0),
    json: Json = False,
) -> None:
    """Go on after `pause`."""
    _say(redis, pool, lambda to: to.resume(worker_id=worker, timeout=timeout), json)


@app.command()
def abort(
    keep: Annotated[bool, typer.Option("--keep", help="Interrupt what runs, but do not cancel it.")] = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(30.0),
    json: Json = False,
) -> None:
    """Cancel the jobs that workers hold; their clients are told. What is queued stays."""
    _say(redis, pool, lambda to: to.abort(drop=not keep, worker_id=worker, timeout=timeout), json)


@app.command()
def stop(
    drain: Annotated[float | None, typer.Option(help="Seconds that running samples have to end.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Drain workers and wait until they have left; unfinished jobs go back to the pool."""
    _say(redis, pool, lambda to: to.stop(drain_s=drain, worker_id=worker, timeout=timeout), json)


@app.command()
def sleep(
    tag: Tags = None,
    hand_back: HandBack = False,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Give up GPU memory, all of it or by tag."""
    params = {"tags": tag or [], "hand_back": hand_back}
    _say(redis, pool, lambda to: to.send("sleep", params, worker_id=worker, timeout=timeout), json)


@app.command()
def wake(
    tag: Tags = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Take GPU memory again, all of it or by tag."""
    _say(redis, pool, lambda to: to.send("wake", {"tags": tag or []}, worker_id=worker, timeout=timeout), json)


@app.command("flush-cache")
def flush_cache(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(60.0),
    json: Json = False,
) -> None:
    """Forget cached prefixes; what runs is interrupted for it, and goes on."""
    _say(redis, pool, lambda to: to.flush_cache(worker_id=worker, timeout=timeout), json)


@app.command("clear-storage")
def clear_storage(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Empty the storage of a hierarchical cache."""
    _say(redis, pool, lambda to: to.clear_storage(worker_id=worker, timeout=timeout), json)


@app.command("set-version")
def set_version(
    number: Annotated[int, typer.Argument(help="Above all that the pool has given away.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(30.0),
    json: Json = False,
) -> None:
    """Call the weights that workers have by another number."""
    _say(redis, pool, lambda to: to.set_version(number, worker_id=worker, timeout=timeout), json)


@app.command()
def audit(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(600.0),
    json: Json = False,
) -> None:
    """Compare every bit of the engines' weights with the trainer's digests; exit code 1 for any finding."""
    found = _ask(redis, pool, lambda to: to.audit(worker_id=worker, timeout=timeout))
    lines = [
        f"{one.worker_id}  version {one.result['version']}  {_audited(one.result)}" if one.ok else _failed(one)
        for one in found.answers.values()
    ]
    lines += [f"not the same weights: {', '.join(group)}" for group in found.apart]
    _print(_plain_audit(found), lines or [found.answers.told()], json)
    raise typer.Exit(int(not found.clean))


@app.command()
def save(
    path: Annotated[Path, typer.Argument(help="Folder on the worker's host; absolute.")],
    format: Annotated[str, typer.Option(help="safetensors, or sharded.")] = "safetensors",
    upload: Upload = "",
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(3600.0),
    json: Json = False,
) -> None:
    """Write the served version to disk, and copy it to a URL."""
    params = {"path": str(path), "format": format} | ({"upload": upload} if upload else {})
    _say(redis, pool, lambda to: to.send("save", params, worker_id=worker, timeout=timeout), json)


@app.command()
def load(
    path: Annotated[Path, typer.Argument(help="Snapshot or checkpoint on the workers' hosts; absolute.")],
    number: Annotated[int, typer.Argument(metavar="VERSION", help="The number it is served under.")],
    format: Annotated[str, typer.Option(help="auto, snapshot, safetensors or sharded.")] = "auto",
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(3600.0),
    json: Json = False,
) -> None:
    """Serve weights from disk."""
    params = {"path": str(path), "version": number, "format": format}
    _say(redis, pool, lambda to: to.send("load", params, worker_id=worker, timeout=timeout), json)


@app.command()
def adapters(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(10.0),
    json: Json = False,
) -> None:
    """LoRA adapters of each worker."""
    _say(redis, pool, lambda to: to.adapters(worker_id=worker, timeout=timeout), json)


@app.command("load-adapter")
def load_adapter(
    name: Annotated[str, typer.Argument(help="What jobs call it.")],
    number: Annotated[int, typer.Argument(metavar="VERSION", help="Its version, at least 1.")],
    path: Annotated[Path, typer.Argument(help="Folder on the workers' hosts, as PEFT saves it; absolute.")],
    pin: Annotated[bool, typer.Option(help="Keep it when a newer version comes.")] = True,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Load a LoRA adapter from disk."""
    where = str(path)
    _say(
        redis,
        pool,
        lambda to: to.load_adapter(name, number, where, pinned=pin, worker_id=worker, timeout=timeout),
        json,
    )


@app.command("unload-adapter")
def unload_adapter(
    name: Annotated[str, typer.Argument(help="What jobs call it.")],
    number: Annotated[int | None, typer.Argument(metavar="[VERSION]", help="Default: all of them.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(120.0),
    json: Json = False,
) -> None:
    """Take a LoRA adapter out of the engines."""
    _say(redis, pool, lambda to: to.unload_adapter(name, number, worker_id=worker, timeout=timeout), json)


@app.command("start-profile")
def start_profile(
    folder: Annotated[Path | None, typer.Option(help="On the worker's host; default: a new one.")] = None,
    activity: Annotated[list[str] | None, typer.Option(help="CPU, GPU or MEM; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop by itself after so many forward passes.")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(60.0),
    json: Json = False,
) -> None:
    """Record what the engines do."""
    params: dict[str, Any] = {"activities": activity or []}
    params |= {} if folder is None else {"folder": str(folder)}
    params |= {} if steps is None else {"steps": steps}
    _say(redis, pool, lambda to: to.send("start_profile", params, worker_id=worker, timeout=timeout), json)


@app.command("stop-profile")
def stop_profile(
    upload: Upload = "",
    out: Annotated[Path | None, typer.Option(help="Write traces here, on this machine: small ones (8 MiB).")] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    worker: Worker = "",
    timeout: float = _timeout(300.0),
    json: Json = False,
) -> None:
    """End a profile; its files stay on the worker's host."""
    fetch = 0 if out is None else 8 << 20
    with plain_errors():
        answers = asyncio.run(
            _with(
                redis,
                pool,
                lambda to: to.stop_profile(upload=upload, fetch_bytes=fetch, worker_id=worker, timeout=timeout),
            )
        )
    for one, result in answers.results.items():
        for name, content in dict(result.get("fetched", {})).items():
            assert out is not None
            target = out / _file_name(one) / _file_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    _show(answers, json)


def _say(redis: str, pool: str, work: Callable[[PoolControl], Awaitable[Answers]], json: bool) -> None:
    _show(_ask(redis, pool, work), json)


def _ask(redis: str, pool: str, work: Callable[[PoolControl], Awaitable[T]]) -> T:
    with plain_errors():
        return asyncio.run(_with(redis, pool, work))


async def _with(redis: str, pool: str, work: Callable[[PoolControl], Awaitable[T]]) -> T:
    async with PoolControl(redis, pool) as control:
        return await work(control)


def _show(answers: Answers, json: bool) -> None:
    lines = [f"{one.worker_id}  {_told(one.result)}" if one.ok else _failed(one) for one in answers.values()]
    _print(_plain(answers), lines or [answers.told()], json)
    raise typer.Exit(int(not answers.ok))


def _print(state: object, lines: list[str], json: bool) -> None:
    for line in [json_module.dumps(state)] if json else map(printable, lines):
        typer.echo(line)


def _plain(answers: Answers) -> dict[str, Any]:
    return {
        worker: {"ok": one.ok, "result": _text(one.result)} | ({} if one.ok else {"kind": one.kind, "error": one.error})
        for worker, one in answers.items()
    }


def _plain_audit(found: PoolAudit) -> dict[str, Any]:
    return {"clean": found.clean, "apart": found.apart, "workers": _plain(found.answers)}


def _text(value: Any) -> Any:
    """Without the bytes of fetched files."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return {name: _text(each) for name, each in value.items()} if isinstance(value, dict) else value


def _file_name(told: str) -> str:
    """A name that leads nowhere else: what workers say about themselves is in Redis, where others write, too."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", told).lstrip(".") or "_"


def _told(result: Any) -> str:
    told = [f"{name}={_text(value)}" for name, value in result.items() if value not in ("", (), [], {})]
    return "  ".join(told) or "done"


def _failed(one: Any) -> str:
    return f"{one.worker_id}  {one.kind}: {one.error}"


def _audited(result: Any) -> str:
    if result["clean"]:
        compared = f"{result['compared']} tensors as the trainer sent them" if result["compared"] else ""
        return f"clean: {compared or 'nothing to compare with (' + str(result['not_compared']) + ')'}"
    return "; ".join(f"{kind}: {', '.join(result[kind])}" for kind in ("wrong", "nonfinite", "zero") if result[kind])
