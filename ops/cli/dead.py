"""`rolloutmq dead`: dead letters, looked at, submitted again, dropped."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer

from ...messages.broker import DeadFilter, DeadLetters, LetterHead, successor
from ...messages.errors import CannotRequeue, ConfigError, InvalidField, NoSuchDeadLetter, PoolBusy
from ...messages.redis import DEFAULT_URL
from ..redis import ask
from ..terminal import printable
from .errors import plain_errors
from .options import Pool, RedisUrl

app = typer.Typer(help="Dead letters: jobs that were given up.", no_args_is_help=True)
T = TypeVar("T")

Cause = Annotated[str, typer.Option(help="Only those whose cause contains this, in any case.")]
Since = Annotated[str, typer.Option(help="Only newer ones: an age (90s, 30m, 2h, 7d) or a date (2026-01-31T08:00).")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Entry ids, as `dead list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that the filters let through, instead of ids.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Url = RedisUrl


@app.command("list")
def list_letters(
    redis: Url = DEFAULT_URL,
    pool: Pool = "default",
    cause: Cause = "",
    since: Since = "",
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """The newest dead letters, newest first."""

    async def read(letters: DeadLetters) -> tuple[list[LetterHead], int]:
        which = DeadFilter(cause, await _since(letters, since), limit=limit)
        return [head async for head in letters.find(which)], await letters.count()

    with plain_errors():
        found, total = _with(redis, pool, read)
    if json:
        typer.echo(json_module.dumps([asdict(head) | {"head": head.head.hex()} for head in found]))
        return
    for head in found:
        typer.echo(f"{head.entry_id}  {_when(head.at)}  job {printable(head.job_id)}  {head.size:,} bytes")
        said = f"{head.cause}: {head.error}" if head.error else head.cause
        typer.echo(f"    {printable(said)}  ({head.attempts} attempts, {printable(head.host) or 'no host'})")
    typer.echo(f"{len(found)} of {total} dead letters")


@app.command()
def show(
    entry_id: Annotated[str, typer.Argument(metavar="ID", help="Entry id, as `dead list` shows it.")],
    redis: Url = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """One dead letter and the job in it, or why that cannot be read."""
    with plain_errors():
        letter = _with(redis, pool, lambda letters: letters.get(entry_id))
    shown: dict[str, Any] = letter.model_dump(exclude={"payload"}) | {"size": len(letter.payload)}
    try:
        job = successor(letter, reply_to="-")
        shown["job"] = _plain(job.model_dump(exclude={"id", "metadata", "reply_to"}, exclude_unset=True))
        shown["why_not_requeued"] = None
    except CannotRequeue as error:
        shown["why_not_requeued"] = str(error)
    shown["head"] = letter.payload[:64].hex()
    if json:
        typer.echo(json_module.dumps(shown))
        return
    for name, value in (shown | {"at": _when(letter.at)}).items():
        text = json_module.dumps(value) if isinstance(value, dict) else str(value)
        typer.echo(f"{name + ':':18}{printable(text)}")


@app.command()
def requeue(
    ids: Ids = None,
    redis: Url = DEFAULT_URL,
    pool: Pool = "default",
    every: All = False,
    cause: Cause = "",
    since: Since = "",
    limit: Limit = None,
    reply_to: Annotated[
        str | None, typer.Option(help="Client that gets the results; default: the one that submitted.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Submit dead letters again, each as a new job, and delete them. Exit code 1 if some could not be."""
    with plain_errors():
        _check_choice(ids, every, cause or since or limit)
        if every:
            params = {"cause": cause, "since": _with(redis, pool, lambda it: _since(it, since)), "limit": limit}
            _confirm(redis, pool, "requeue", params, yes)
            raise typer.Exit(_requeue_all(redis, pool, params | {"reply_to": reply_to}))
        _ask(f"requeue {len(ids or [])} dead letters of pool {pool}?", yes)
        raise typer.Exit(_with(redis, pool, lambda letters: _requeue_each(letters, ids or [], reply_to)))


@app.command()
def drop(
    ids: Ids = None,
    redis: Url = DEFAULT_URL,
    pool: Pool = "default",
    every: All = False,
    cause: Cause = "",
    since: Since = "",
    limit: Limit = None,
    yes: Yes = False,
) -> None:
    """Delete dead letters. Exit code 1 if some were not there."""

    async def matching(letters: DeadLetters) -> list[str]:
        which = DeadFilter(cause, await _since(letters, since), limit=limit)
        return [head.entry_id async for head in letters.find(which)]

    with plain_errors():
        _check_choice(ids, every, cause or since or limit)
        # The very ones that were counted: a letter that comes while somebody thinks is not dropped unseen.
        chosen = _with(redis, pool, matching) if every else ids or []
        if chosen:
            _ask(f"drop {len(chosen)} dead letters of pool {pool} for good?", yes)
        raise typer.Exit(_with(redis, pool, lambda letters: _drop_each(letters, chosen)))


async def _requeue_each(letters: DeadLetters, ids: list[str], reply_to: str | None) -> int:
    failed = 0
    for entry_id in ids:
        try:
            typer.echo(f"{entry_id} is job {await letters.requeue(entry_id, reply_to=reply_to)}")
        except (CannotRequeue, NoSuchDeadLetter, InvalidField, PoolBusy) as error:
            failed += 1
            typer.secho(f"{type(error).__name__}: {printable(str(error))}", fg="red", err=True)
    return int(failed > 0)


async def _drop_each(letters: DeadLetters, ids: list[str]) -> int:
    dropped = 0
    for entry_id in ids:
        try:
            await letters.drop(entry_id)
            dropped += 1
        except (NoSuchDeadLetter, InvalidField) as error:
            typer.secho(f"{type(error).__name__}: {printable(str(error))}", fg="red", err=True)
    typer.echo(f"dropped {dropped} of {len(ids)}")
    return int(dropped < len(ids))


def _requeue_all(redis_url: str, pool: str, params: dict[str, Any]) -> int:
    """The operation that `ops run dead-requeue` is, here and now."""
    from ..operations.run import run_here
    from ..terminal import ProgressLine

    with ProgressLine() as line:
        given = {name: value for name, value in params.items() if value is not None}
        result = run_here("dead-requeue", given, redis_url, pool, line.report)
    for refusal in result["refusals"]:
        typer.secho(printable(refusal["why"]), fg="red", err=True)
    typer.echo(f"requeued {result['requeued']}, refused {result['refused']}")
    return int(result["refused"] > 0)


def _confirm(redis_url: str, pool: str, verb: str, params: dict[str, Any], yes: bool) -> None:
    async def count(letters: DeadLetters) -> int:
        which = DeadFilter(params["cause"], params["since"], limit=params["limit"])
        return len([None async for _ in letters.find(which)])

    if not yes:
        _ask(f"{verb} {_with(redis_url, pool, count)} dead letters of pool {pool}?", yes)


def _ask(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)


def _check_choice(ids: list[str] | None, every: bool, filtered: object) -> None:
    if bool(ids) == every or (ids and filtered):
        raise ConfigError("say which: entry ids, or --all with or without --cause, --since and --limit")


def _with(redis_url: str, pool: str, use: Callable[[DeadLetters], Awaitable[T]]) -> T:
    return ask(redis_url, pool, lambda broker: use(DeadLetters(broker)))


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


async def _since(letters: DeadLetters, text: str) -> float | None:
    """Unix seconds; ages are counted back from Redis' clock."""
    if not text:
        return None
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text):
        return max(0.0, await letters.now() - float(match[1]) * _UNITS[match[2]])
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        allowed = "an age such as 90s, 30m, 2h, 7d, or a date such as 2026-01-31T08:00"
        raise InvalidField("since", text, allowed) from None


def _when(seconds: float) -> str:
    if not 0 < seconds < 1 << 34:
        return "at an unknown time"
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _plain(value: Any) -> Any:
    """JSON of a job; what is long is cut, and says so."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return f"{len(value) // 4} token ids"
    if isinstance(value, str) and len(value) > 400:
        return f"{value[:400]}… ({len(value)} characters)"
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
