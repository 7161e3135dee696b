"""`rolloutmq dead`: list and show dead letters, submit them again, drop them."""

from __future__ import annotations

import inspect
import json as json_module
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ...messages.broker import DeadFilter, DeadLetters, LetterHead, successor
from ...messages.errors import CannotRequeue, ConfigError, InvalidField, NoSuchDeadLetter, PoolBusy
from ...messages.redis import DEFAULT_URL
from ..redis import ask
from ..terminal import printable, when
from .options import Json, Pool, RedisUrl, Yes, derived, given, group, moment, say

app = group("List, requeue or drop jobs that were given up. They are called dead letters.")
T = TypeVar("T")

Cause = Annotated[str, typer.Option(help="Only those whose cause contains this, in any case.")]
Since = Annotated[str, typer.Option(help="Only newer ones: an age (90s, 30m, 2h, 7d) or a date (2026-01-31T08:00).")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many.")]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Entry ids, as `dead list` shows them.")]
All = Annotated[bool, typer.Option("--all", help="All that the filters let through, instead of ids.")]


@app.command("list")
def list_letters(
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    cause: Cause = "",
    since: Since = "",
    limit: Limit = 50,
    json: Json = False,
) -> None:
    """The newest dead letters, newest first."""

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


@app.command()
def show(
    entry_id: Annotated[str, typer.Argument(metavar="ID", help="Entry id, as `dead list` shows it.")],
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """One dead letter and the job in it, or why that cannot be read."""
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """The arguments and options that `requeue` and `drop` share."""

    ids: Ids = None
    redis: RedisUrl = DEFAULT_URL
    pool: Pool = "default"
    every: All = False
    cause: Cause = ""
    since: Since = ""
    limit: Limit = None
    yes: Yes = False
    json: Json = False


def _on_chosen(act: Callable[..., int], *more: inspect.Parameter) -> None:
    """A command with the options of Chosen, and `more`. `act` takes both and returns the exit code."""
    kinds = get_type_hints(Chosen, include_extras=True)
    shared = [given(one.name, kinds[one.name], None, one.default) for one in fields(Chosen)]

    def run(**typed: Any) -> None:
        own = {one.name: typed.pop(one.name) for one in more}
        chosen = Chosen(**typed)
        if bool(chosen.ids) == chosen.every or (chosen.ids and (chosen.cause or chosen.since or chosen.limit)):
            raise ConfigError("say which: entry ids, or --all with or without --cause, --since and --limit")
        raise typer.Exit(act(chosen, **own))

    app.command(act.__name__)(derived(run, [*shared, *more], inspect.getdoc(act) or ""))


def requeue(chosen: Chosen, reply_to: str | None) -> int:
    """Submit dead letters again, each as a new job, and delete them. Exit code 1 if that failed for some.

    \b
    rolloutmq dead requeue 1718000000000-0
    rolloutmq dead requeue --all --cause "was lost" --since 2h
    """
    ids, redis, pool, since = chosen.ids or [], chosen.redis, chosen.pool, chosen.since
    if chosen.every:
        known = _with(redis, pool, lambda letters: _since(letters, since))
        params = {"cause": chosen.cause, "since": known, "limit": chosen.limit}
        _confirm(redis, pool, params, chosen.yes)
        return _requeue_all(redis, pool, params | {"reply_to": reply_to}, chosen.json)
    _ask(f"requeue {len(ids)} dead letters of pool {pool}?", chosen.yes)
    return _with(redis, pool, lambda letters: _requeue_each(letters, ids, reply_to, chosen.json))


def drop(chosen: Chosen) -> int:
    """Delete dead letters. Exit code 1 if some were not there."""

    async def matching(letters: DeadLetters) -> list[str]:
        which = DeadFilter(chosen.cause, await _since(letters, chosen.since), limit=chosen.limit)
        return [head.entry_id async for head in letters.find(which)]

    # Only the letters that were counted are dropped, none that comes while the question is on the screen.
    ids = _with(chosen.redis, chosen.pool, matching) if chosen.every else chosen.ids or []
    if ids:
        _ask(f"drop {len(ids)} dead letters of pool {chosen.pool} for good?", chosen.yes)
    return _with(chosen.redis, chosen.pool, lambda letters: _drop_each(letters, ids, chosen.json))


ReplyTo = Annotated[str | None, typer.Option(help="Client that gets the results; default: the one that submitted.")]
_on_chosen(requeue, given("reply_to", ReplyTo, None, None))
_on_chosen(drop)


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
    from ..terminal import ProgressLine

    with ProgressLine() as line:
        given = {name: value for name, value in params.items() if value is not None}
        result = run_here("dead-requeue", given, redis_url, pool, line.report)
    for refusal in result["refusals"]:
        typer.secho(printable(refusal["why"]), fg="red", err=True)
    say(result, [f"requeued {result['requeued']}, refused {result['refused']}"], json)
    return int(result["refused"] > 0)


def _confirm(redis_url: str, pool: str, params: dict[str, Any], yes: bool) -> None:
    async def count(letters: DeadLetters) -> int:
        which = DeadFilter(params["cause"], params["since"], limit=params["limit"])
        return len([None async for _ in letters.find(which)])

    if not yes:
        _ask(f"requeue {_with(redis_url, pool, count)} dead letters of pool {pool}?", yes)


def _ask(question: str, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)


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
