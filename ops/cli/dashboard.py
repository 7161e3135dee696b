"""`rolloutmq dashboard` and `rolloutmq report`: a pool or a run on a page, and a run on one screen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...messages.defaults import DEFAULT_URL
from ..files import check_out, writing
from .journal import complain
from .options import Json, LogLevel, Pool, RedisUrl, finite, log_to_stderr, say

if TYPE_CHECKING:
    from ..dashboard import History, Rollouts
    from ..journal import TextOf

Tokenizer = Annotated[str | None, typer.Option(help="Model or tokenizer.json that turns tokens into text.")]


def dashboard(
    context: typer.Context,
    journal: Annotated[
        str | None, typer.Option(help="Folder of a journal. With --redis: what the live pool's trainer writes.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Whoever reaches it can read prompts.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8790,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that requeues jobs.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key in PEM.")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Serve only browsers with a certificate of it.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write the journal's page as one HTML file, and end.")] = None,
    tokenizer: Tokenizer = None,
    redis: RedisUrl = DEFAULT_URL,
    pool: Pool = "default",
    json: Annotated[bool, typer.Option("--json", help="Print where it listens as one line of JSON.")] = False,
    log_level: LogLevel = "info",
) -> None:
    """Serve a page of a live pool, or of a run's journal. Until SIGTERM or Ctrl-C.

    \b
    rolloutmq dashboard --pool default
    rolloutmq dashboard --journal out/journal
    rolloutmq dashboard --journal out/journal --export out/run.html
    """
    from ...messages.errors import ConfigError

    source = context.get_parameter_source("redis")
    live = journal is None or (source is not None and source.name == "COMMANDLINE")
    if export is not None:
        if journal is None or live:
            raise ConfigError("--export needs --journal alone: a live pool has no end")
        _export(journal, export, tokenizer, json)
        return
    try:
        from ..dashboard import LIMITS, LOOPBACK, read_token
        from ..http import HttpServer, Tls
    except ModuleNotFoundError as error:
        raise ConfigError(f"the dashboard needs {error.name}: pip install 'rolloutmq[dashboard]'") from None
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key: both, or none")
    if token_file is not None and not live:
        raise ConfigError("--token-file is for a live pool: a journal is only shown")
    tls = None if tls_cert is None or tls_key is None else Tls(tls_cert, tls_key, tls_client_ca)
    token = read_token(token_file) if token_file is not None else None
    log_to_stderr(log_level)

    async def run() -> None:
        from ..dashboard import live_application, recorded_application
        from ..redis import connected

        async def serve(app: object) -> None:
            server = HttpServer(app, host, port, limits=LIMITS, tls=tls)  # type: ignore[arg-type]
            where = f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{server.port}/"
            open_to = [] if host in LOOPBACK else [f"everybody who reaches {host} can read prompts and answers"]
            say({"url": where}, [f"open {where}", *open_to], json)
            await server.serve()

        if not live and journal is not None:
            await serve(recorded_application(*_recorded(journal, tokenizer), host))
            return
        async with connected(redis, pool, all_shards=True, lenient=True) as connection:
            await serve(
                live_application(connection, pool, host, token=token, journal=journal, text_of=_texts(tokenizer))
            )

    asyncio.run(run())


def _recorded(journal: str, tokenizer: str | None) -> tuple[History, Rollouts]:
    from ..dashboard import Rollouts, load

    history = load(journal)
    for problem in history.recording.problems:
        complain(problem)
    return history, Rollouts(journal, history, _texts(tokenizer))


def _texts(tokenizer: str | None) -> TextOf | None:
    from ..journal import texts_of

    return None if tokenizer is None else texts_of(tokenizer)


def _export(journal: str, file: Path, tokenizer: str | None, json: bool) -> None:
    from ..dashboard import as_page, page_of

    check_out("--export", file)
    history, rollouts = _recorded(journal, tokenizer)
    _write("--export", file, as_page(page_of(history, rollouts)))
    say({"file": str(file)}, [f"wrote {file}"], json)


def _write(option: str, file: Path, text: str) -> None:
    with writing(option, file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def report(
    journal: Annotated[str, typer.Argument(help="Folder or URL of a journal.")],
    html: Annotated[Path | None, typer.Option(help="Write the run's page as one HTML file, too.")] = None,
    max_stale_share: Annotated[
        float | None, typer.Option(min=0, max=1, callback=finite, help="Of consumed samples over four versions old.")
    ] = None,
    max_failed_share: Annotated[float | None, typer.Option(min=0, max=1, callback=finite, help="Of the jobs.")] = None,
    max_idle_share: Annotated[
        float | None, typer.Option(min=0, max=1, callback=finite, help="Of the workers' time, without a job.")
    ] = None,
    max_deaths: Annotated[int | None, typer.Option(min=0, help="Of workers.")] = None,
    gpus: Annotated[int, typer.Option("--gpus-per-worker", min=1, help="For the GPU-seconds.")] = 1,
    books: Annotated[
        Path | None, typer.Option(help="A trainer's checkpoint, or a feed's state as JSON: its books, too.")
    ] = None,
    tokenizer: Tokenizer = None,
    json: Json = False,
) -> None:
    """Sum up a run from its journal. Exit code 1 if it breaks a limit, also one of which the journal knows nothing.

    \b
    rolloutmq report out/journal --max-stale-share 0.1 --max-failed-share 0.01
    """
    from ..dashboard import Limits, as_page, page_of, report_of

    if html is not None:
        check_out("--html", html)
    kept = None if books is None else _books(books)
    history, rollouts = _recorded(journal, tokenizer)
    found = report_of(history, Limits(max_stale_share, max_failed_share, max_idle_share, max_deaths), gpus=gpus)
    lines = found.lines()
    data = {"report": found.data, "broken": list(found.broken)}
    if kept is not None:
        data["books"] = kept[0]
        lines += ["", *kept[1]]
    if html is not None:
        _write("--html", html, as_page(page_of(history, rollouts)))
        lines.append(f"wrote {html}")
    from ..journal import plain

    say(plain(data), lines, json)
    raise typer.Exit(int(bool(found.broken)))


def _books(file: Path) -> tuple[dict[str, Any], list[str]]:
    from ..books import books_lines, read_books

    found = read_books("--books", file)
    return found.report(), books_lines(found)
