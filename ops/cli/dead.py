"""`rolloutmq dead`: list and show dead letters, submit them again, drop them."""

from __future__ import annotations

import json as json_module
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

import typer

from ...messages.broker import DeadFilter, DeadLetters, LetterHead, successor
from ...messages.errors import CannotRequeue, ConfigError, InvalidField, NoSuchDeadLetter, PoolBusy
from ...messages.redis import DEFAULT_URL
from ..redis import ask
from ..terminal import printable, when
from .options import Json, Pool, RedisUrl, Yes, moment, say

T = TypeVar("T")
LISTED = 50

Do = Annotated[
    Literal["list", "show", "requeue", "drop"], typer.Argument(metavar="ACTION", help="list, show, requeue or drop.")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Entry ids, as `dead list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that the filters let through, instead of ids.")]
Cause = Annotated[str, typer.Option(help="Only those whose cause contains this, in any case.")]
Since = Annotated[str, typer.Option(help="Only newer ones: an age (90s, 30m, 2h, 7d) or a date (2026-01-31T08:00).")]
Limit = Annotated[int | None, typer.Option(min=1, help=f"At most so many; `list` shows {LISTED} by default.")]
ReplyTo = Annotated[
    str | None, typer.Option(help="With requeue: client that gets the results; default: the one that submitted.")
]


def dead(
    do: Do = "list",
    ids: Ids = None,
    every: All = False,
    cause: Cause = "",
    since: Since = "",
    limit: Limit = None,
    reply_to: ReplyTo = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    yes: Yes = False,
    json: Json = False,
) -> None:
    """List, show, requeue or drop jobs that were given up. They are called dead letters.

    list shows the newest ones, newest first. show prints the job in a letter, or why it cannot be read. requeue submits
    each again as a new job, and deletes the letter. drop deletes letters. Exit code 1 if that failed for some.

    \b
    rolloutmq dead list --cause "was lost"
    rolloutmq dead requeue 1718000000000-0
    rolloutmq dead requeue --all --cause "was lost" --since 2h
    """
    filtered = bool(cause or since or limit)
    if reply_to is not None and do != "requeue":
        raise ConfigError("--reply-to is for requeue")
    if do == "list" and not (ids or every):
        _list(redis, pool, cause, since, limit or LISTED, json)
    elif do == "show" and ids and len(ids) == 1 and not (every or filtered):
        _show(redis, pool, ids[0], json)
    elif do in {"list", "show"} or bool(ids) == every or (ids and filtered):
        raise ConfigError("say which: entry ids, or --all with or without --cause, --since and --limit; one id to show")
    else:
        after, chosen = _with(redis, pool, lambda letters: _chosen(letters, ids, cause, since, limit))
        if (chosen or do == "requeue") and not yes:
            for_good = " for good" if do == "drop" else ""
            typer.confirm(f"{do} {len(chosen)} dead letters of pool {pool}{for_good}?", abort=True, err=True)
        if do == "drop":  # only the letters that were counted, none that came while the question was on the screen
            code = _with(redis, pool, lambda letters: _drop_each(letters, chosen, json))
        elif ids:
            code = _with(redis, pool, lambda letters: _requeue_each(letters, ids, reply_to, json))
        else:
            code = _requeue_all(
                redis, pool, {"cause": cause, "since": after, "limit": limit, "reply_to": reply_to}, json
            )
        raise typer.Exit(code)


def _list(redis: str, pool: str, cause: str, since: str, limit: int, json: bool) -> None:
    async def read(letters: DeadLetters) -> tuple[list[LetterHead], int, int]:
        which = DeadFilter(cause, await _since(letters, since), limit=limit)
        return [head async for head in letters.find(which)], await letters.count(), await letters.trimmed()

    found, total, trimmed = _with(redis, pool, read)
    lines: list[str] = []
    for head in found:
        said = f"{head.cause}: {head.error}" if head.error else head.cause
        lines.append(f"{head.entry_id}  {when(head.at)}  job {head.job_id}  {head.size:,} bytes")
        lines.append(f"    {said}  ({head.attempts} attempts, {head.host or 'no host'})")
        if head.dropped:
            lines.append(f"    its payload of {head.dropped:,} bytes was too large to be kept")
    lines.append(f"{len(found)} of {total} dead letters")
    if trimmed:
        lines.append(f"{trimmed:,} older ones have made room for newer ones")
    say([asdict(head) | {"head": head.head.hex()} for head in found], lines, json)


def _show(redis: str, pool: str, entry_id: str, json: bool) -> None:
    letter = _with(redis, pool, lambda letters: letters.get(entry_id))
    shown: dict[str, Any] = letter.model_dump(exclude={"payload"}) | {"size": len(letter.payload)}
    try:
        job = successor(letter, reply_to="-")
        shown["job"] = _plain(job.model_dump(exclude={"id", "metadata", "reply_to"}, exclude_unset=True))
        shown["why_not_requeued"] = None
    except CannotRequeue as error:
        shown["why_not_requeued"] = str(error)
    shown["head"] = letter.payload[:64].hex()
    lines = [
        f"{name + ':':18}{json_module.dumps(value) if isinstance(value, dict) else value}"
        for name, value in (shown | {"at": when(letter.at)}).items()
    ]
    say(shown, lines, json)


async def _chosen(
    letters: DeadLetters, ids: list[str] | None, cause: str, since: str, limit: int | None
) -> tuple[float | None, list[str]]:
    """(--since as Unix seconds, the entry ids): those that were given, or all that the filters let through."""
    after = await _since(letters, since)
    which = DeadFilter(cause, after, limit=limit)
    return after, ids or [head.entry_id async for head in letters.find(which)]


async def _each(ids: list[str], act: Callable[[str], Awaitable[T]]) -> tuple[dict[str, T], list[dict[str, str]]]:
    """(results of `act` by entry id, refusals). Refusals are printed on stderr, too."""
    done: dict[str, T] = {}
    refusals: list[dict[str, str]] = []
    for entry_id in ids:
        try:
            done[entry_id] = await act(entry_id)
        except (CannotRequeue, NoSuchDeadLetter, InvalidField, PoolBusy) as error:
            typer.secho(f"{type(error).__name__}: {printable(str(error))}", fg="red", err=True)
            refusals.append({"entry_id": entry_id, "why": str(error)})
    return done, refusals


async def _requeue_each(letters: DeadLetters, ids: list[str], reply_to: str | None, json: bool) -> int:
    jobs, refusals = await _each(ids, lambda entry_id: letters.requeue(entry_id, reply_to=reply_to))
    state = {"requeued": len(jobs), "refused": len(refusals), "refusals": refusals, "jobs": jobs}
    say(state, [f"{entry_id} is job {job}" for entry_id, job in jobs.items()], json)
    return int(bool(refusals))


async def _drop_each(letters: DeadLetters, ids: list[str], json: bool) -> int:
    dropped, refusals = await _each(ids, letters.drop)
    say({"dropped": len(dropped), "refusals": refusals}, [f"dropped {len(dropped)} of {len(ids)}"], json)
    return int(bool(refusals))


def _requeue_all(redis_url: str, pool: str, params: dict[str, Any], json: bool) -> int:
    """The operation that `ops run dead-requeue` is, here and now."""
    from ..operations import run_here

    given = {name: value for name, value in params.items() if value is not None}
    result = run_here("dead-requeue", given, redis_url, pool)
    for refusal in result["refusals"]:
        typer.secho(printable(refusal["why"]), fg="red", err=True)
    say(result, [f"requeued {result['requeued']}, refused {result['refused']}"], json)
    return int(result["refused"] > 0)


def _with(redis_url: str, pool: str, use: Callable[[DeadLetters], Awaitable[T]]) -> T:
    return ask(redis_url, pool, lambda broker: use(DeadLetters(broker)))


async def _since(letters: DeadLetters, text: str) -> float | None:
    """Unix seconds; ages are counted back from Redis' clock."""
    return moment("since", text, await letters.now()) if text else None


def _plain(value: Any) -> Any:
    """JSON of a job; long values are cut and say so."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return f"{len(value) // 4} token ids"
    if isinstance(value, str) and len(value) > 400:
        return f"{value[:400]}… ({len(value)} characters)"
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
