"""`rolloutmq journal` and `rolloutmq job`: what happened in a run, and to one job."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ...messages.defaults import DEFAULT_URL
from ..files import check_out
from ..terminal import printable
from .options import Json, Pool, RedisUrl, moment, say

if TYPE_CHECKING:
    from ..journal import Life, TextOf


class _WithDefault(TyperGroup):
    """`rolloutmq journal FOLDER` is `rolloutmq journal show FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_WithDefault,
    help="Print a journal, or export it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Folder = Annotated[str, typer.Argument(help="Folder or URL of a journal.")]
Jobs = Annotated[list[str] | None, typer.Option("--job", help="Only of this job; may be repeated.")]
Client = Annotated[str | None, typer.Option(help="Only of this client.")]
Group = Annotated[str | None, typer.Option("--group", help="Only of this group.")]
Version = Annotated[int | None, typer.Option(min=0, help="Only results that these weights sampled.")]
Since = Annotated[
    str, typer.Option(help="From then on: an age (90s, 30m, 2h, 7d) or a date in UTC (2026-01-31T08:00).")
]
Until = Annotated[str, typer.Option(help="Until then: an age or a date, as in --since.")]


@app.command()
def show(
    folder: Folder,
    job: Jobs = None,
    client: Client = None,
    group: Group = None,
    version: Version = None,
    event: Annotated[
        list[str] | None, typer.Option(help="Only of this kind, as docs/journal.md lists them; may be repeated.")
    ] = None,
    since: Since = "",
    until: Until = "",
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many entries.")] = None,
    json: Json = False,
) -> None:
    """Print what a journal has. Oldest first; what is damaged in it is told on stderr.

    \b
    rolloutmq journal out/journal --event result --version 7 --since 2h
    """
    from itertools import islice

    from ...messages.journal import read
    from ..journal import as_data, as_line

    kinds: Any = event
    first, last = window(since, until)
    found = read(folder, job=job, client=client, group=group, version=version, events=kinds, since=first, until=last,
                 on_problem=complain)  # fmt: skip
    for entry in islice(found, limit):
        say(as_data(entry), [as_line(entry)], json)


@app.command("export")
def to_parquet(
    folder: Folder,
    file: Annotated[Path, typer.Argument(metavar="FILE.parquet", help="File to write.")],
    table: Annotated[str, typer.Option(help="samples, with their jobs and notes, or events.")] = "samples",
    job: Jobs = None,
    client: Client = None,
    group: Group = None,
    version: Version = None,
    since: Since = "",
    until: Until = "",
    overwrite: Annotated[bool, typer.Option(help="Replace the file.")] = False,
    json: Json = False,
) -> None:
    """Write a journal as a Parquet file, for pandas, polars and DuckDB.

    \b
    rolloutmq journal export out/journal samples.parquet --since 2h
    """
    from ...messages.errors import InvalidField
    from ..journal import TABLES, export

    kind: Any = table
    if table not in TABLES:
        raise InvalidField("--table", table, f"one of {', '.join(TABLES)}")
    check_out("FILE", file)
    first, last = window(since, until)
    rows = export(folder, file, kind, overwrite=overwrite, on_problem=complain, job=job, client=client, group=group,
                  version=version, since=first, until=last)  # fmt: skip
    say({"file": str(file), "table": table, "rows": rows}, [f"wrote {rows:,} {table} to {file}"], json)


def job(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="A job's id.")],
    journal: Annotated[
        str | None,
        typer.Option(help="Folder of a journal; else the pool is asked.", envvar="ROLLOUTMQ_JOURNAL"),
    ] = None,
    sample: Annotated[list[int] | None, typer.Option(min=0, help="Only this sample; may be repeated.")] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the tokens, coloured by version, marked where unlikely.")
    ] = False,
    model: Annotated[
        str | None, typer.Option("--model", "--tokenizer", help="Model or tokenizer.json that turns tokens into text.")
    ] = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Json = False,
) -> None:
    """Show a job's whole life, from a journal or the pool.

    \b
    rolloutmq job 0192f0c1a2b34c5d8e9fa0b1c2d3e4f5
    rolloutmq job 0192f0c1a2b34c5d8e9fa0b1c2d3e4f5 --journal out/journal --tokens --model Qwen/Qwen3-0.6B
    """
    from ...messages.errors import ConfigError, InvalidField

    if journal is None:
        if tokens or sample or model:
            raise ConfigError("--tokens, --sample and --model need --journal: Redis does not keep results")
        _say_live(job_id, redis, pool, json)
        return
    from ...messages.journal import read
    from ..journal import life_of, texts_of

    text_of = None if model is None else texts_of(model)
    life = life_of(job_id, read(journal, job=job_id, on_problem=complain))
    if life is None:
        raise InvalidField("ID", job_id, f"a job in {journal}")
    say(life.as_data(), life.lines(sample or ()), json)
    if tokens and not json:
        _say_tokens(life, sample, text_of)


def window(since: str, until: str) -> tuple[float, float]:
    """Unix seconds of --since and --until; without them, all times. Raises InvalidField."""
    return moment("since", since) if since else -math.inf, moment("until", until) if until else math.inf


def complain(problem: str) -> None:
    """Tell a reader's problem on stderr."""
    typer.secho(printable(problem), fg="yellow", err=True)


def _say_live(job_id: str, redis: str, pool: str, json: bool) -> None:
    from ...messages.errors import InvalidField
    from ...messages.ids import is_id
    from ..journal import live_of
    from ..redis import ask

    if not is_id(job_id):
        raise InvalidField("ID", job_id, "32 lower-case hex digits")
    live = ask(redis, pool, lambda broker: live_of(broker, job_id))
    if live is None:
        allowed = f"a job that pool {pool} has, or that ended within the hour; --journal looks into a journal"
        raise InvalidField("ID", job_id, allowed)
    say(live.as_data(), live.lines(), json)


def _say_tokens(life: Life, samples: Iterable[int] | None, text_of: TextOf | None) -> None:
    """Colours in a terminal that wants them, plain text elsewhere."""
    from rich.console import Console

    from ..journal import LEGEND, SHOWN_SAMPLES, coloured

    console = Console(highlight=False, soft_wrap=True)
    colours = console.is_terminal and not console.no_color
    if colours:
        typer.echo(f"\ntokens: {LEGEND}")
    chosen = list(samples) if samples else sorted(life.results)
    for number in chosen[:SHOWN_SAMPLES]:
        result = life.sample(number)
        if result is None:
            typer.echo(f"\nsample {number}: the journal does not have its tokens")
            continue
        shown = coloured(result, text_of)
        typer.echo(f"\nsample {number}:")
        if colours:
            console.print(shown)
        else:
            typer.echo(shown.plain)
    if len(chosen) > SHOWN_SAMPLES:
        typer.echo(f"\n{len(chosen) - SHOWN_SAMPLES:,} more samples are left out; --sample NUMBER shows one")
