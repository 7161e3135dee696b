"""`rolloutmq replay`: recorded samples are chosen from a journal, and a kind of replay says a verdict on each."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...messages.redis import DEFAULT_URL
from ..files import check_out, writing
from ..replay import DEPTHS, Recorded, Settings, Verdict, as_html, recorded
from ..terminal import printable
from .options import Json, RedisUrl, finite, moment, say

if TYPE_CHECKING:
    from ..journal import TextOf


def replay(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Jobs, or samples as JOB.SAMPLE.")] = None,
    journal: Annotated[
        str | None, typer.Option(help="Folder of the journal.", envvar="ROLLOUTMQ_JOURNAL", show_default=False)
    ] = None,
    depth: Annotated[str, typer.Option(help=f"How deep: {', '.join((*DEPTHS, 'loss', 'schedule'))}.")] = "tokens",
    since: Annotated[str | None, typer.Option(help="Results from then on: 2026-11-23T02:00 (UTC), or 90m ago.")] = None,
    until: Annotated[str | None, typer.Option(help="Results up to then.")] = None,
    where: Annotated[str | None, typer.Option(help="Expression, such as 'reward < 0 and staleness > 2'.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="Only what these weights sampled.")] = None,
    group: Annotated[str | None, typer.Option(help="Only of this group.")] = None,
    client: Annotated[str | None, typer.Option(help="Only of this client.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many samples.")] = None,
    snapshots: Annotated[str | None, typer.Option(help="Folder with the recorded versions of the weights.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A checkpoint to use in place of every version.")] = None,
    adapters: Annotated[Path | None, typer.Option(help="Folder with a folder NAME@VERSION of each adapter.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model, version 0; default: as the samples say.")] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON, a setting of the engine, as of `rolloutmq worker`; repeatable.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Generate in this pool instead, with the weights that it has now.")
    ] = None,
    queued: Annotated[
        bool, typer.Option("--queued", help="Generate copies of jobs that wait in --pool, here, and print what comes.")
    ] = False,
    redis: RedisUrl = DEFAULT_URL,
    logprob_limit: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Largest difference of log-probabilities: 1e-5, or 1e-4 of a score."),
    ] = None,
    loss: Annotated[str | None, typer.Option(help="--depth loss: MODULE:FUNCTION(batch, notes) -> losses.")] = None,
    score: Annotated[bool, typer.Option("--score", help="Only recompute log-probabilities.")] = False,
    score_every: Annotated[
        int | None, typer.Option(min=1, help="Follow the journal: score every so many samples that arrive.")
    ] = None,
    mean_limit: Annotated[
        float, typer.Option(min=0, callback=finite, help="--score: largest mean difference where not all is float32.")
    ] = 0.05,
    dtype: Annotated[str, typer.Option(help="--score: of the forward pass.")] = "float32",
    device: Annotated[str, typer.Option(help="--score: where it runs, such as cuda:0.")] = "cpu",
    bisect: Annotated[bool, typer.Option("--bisect", help="Find the version at which it broke.")] = False,
    metric: Annotated[str | None, typer.Option(help="--bisect: its mean is to be at least --below.")] = None,
    below: Annotated[float | None, typer.Option(callback=finite, help="--bisect: see --metric.")] = None,
    check: Annotated[
        str | None, typer.Option(help="--bisect: MODULE:FUNCTION(samples, weights_path) -> bool, broken where False.")
    ] = None,
    each: Annotated[int, typer.Option(min=1, help="--bisect: samples to replay of each version and worker.")] = 8,
    ends: Annotated[bool, typer.Option("--ends", help="--bisect: test the oldest and newest version, too.")] = False,
    allow_unverified: Annotated[int, typer.Option(min=0, help="So many unverified samples are no failure.")] = 0,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, callback=finite, help="Share of the samples that may differ.")
    ] = 0.0,
    html: Annotated[Path | None, typer.Option(help="Write a report as one HTML page here.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model or tokenizer.json for the report's texts; default: --model, if a folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Generate recorded samples again, and compare tokens.

    Exit code 0 if all are the same, 1 if more than --threshold of them differ or one cannot be verified, 2 if nothing
    could be tried. With --json the last line has the report.

    \b
    rolloutmq replay --journal out/journal --snapshots out/snapshots --where 'reward < 0' --limit 100
    rolloutmq replay --journal out/journal --pool default --since 90m --html out/replay.html
    rolloutmq replay --journal out/journal --snapshots out/snapshots --score
    rolloutmq replay --journal out/journal --snapshots out/snapshots --bisect
    """
    from ...messages.errors import ConfigError
    from ..flags import parse_extra
    from ..replay import Limits, Where, summary
    from ..replay.checks import Losses
    from .replay_checks import Property, Scoring, follow, look

    if html is not None:
        check_out("--html", html)
    text_of = _texts(tokenizer, model) if json or html is not None else None

    kinds = {"--queued": queued, "--score-every": score_every is not None, "--bisect": bisect, "--score": score}
    chosen_by = {
        "ID": ids, "--since": since, "--until": until, "--where": where, "--version": version is not None,
        "--group": group, "--client": client, "--limit": limit,
    }  # fmt: skip
    _check(depth, kinds, chosen_by, loss, journal, pool, html)
    largest = logprob_limit if logprob_limit is not None else 1e-4 if score or score_every else 1e-5
    scoring = Scoring(score, largest, mean_limit, dtype, device)
    settings = Settings(
        limits=Limits(logprob=largest),
        model=model,
        snapshots=None if snapshots is None else Path(snapshots),
        weights=weights,
        adapters=adapters,
        engine=parse_extra(engine or []),
    )
    if queued:
        raise typer.Exit(_copies(redis, pool or "default", limit, settings, version, json))
    assert journal is not None
    begin, end = _between(since, until)
    if depth == "schedule":
        raise typer.Exit(_schedule(journal, ids, begin, end, json))
    if score_every is not None:
        follow(journal, score_every, settings, scoring)
    unread: list[str] = []

    def note_unread(line: str) -> None:
        unread.append(line)
        _complain(line)

    chosen = _chosen(
        journal,
        ids or [],
        limit,
        client=client,
        group=group,
        version=version,
        since=begin,
        until=end,
        where=None if where is None else Where(where),
        on_problem=_complain,
        on_unread=note_unread,
    )
    if not chosen and not unread:
        raise ConfigError(f"{journal} has no such sample")
    asked = Property(metric, below, check, each, ends) if bisect else None
    if (looked := look(chosen, settings, scoring, asked, loss if depth == "loss" else None)) is not None:
        say(looked.as_data(), looked.lines(), json)
        raise typer.Exit(2 if isinstance(looked, Losses) and not looked.samples else 0)
    verdicts = scoring.verdicts(chosen, settings) if score else _verdicts(chosen, settings, depth, redis, pool)
    _say_each(verdicts, json)
    if score:
        say({"gaps": (gaps := scoring.gaps(verdicts)).as_data()}, gaps.lines(), json)
    told = summary(verdicts, len(unread))
    counts = ", ".join(f"{told[state]} {state}" for state in ("same", "differs", "unverified"))
    lines = [f"{told['samples']} samples, {told['tokens']} tokens: {counts}"]
    report: dict[str, Any] = {}
    if json or html is not None:
        about = {
            "depth": "score" if score else depth,
            "weights": _weights(settings, pool),
            "model": model or "as recorded",
        }
        report = _report(verdicts, unread, about, settings, journal, text_of)
    if html is not None:
        _write(html, report)
        lines.append(f"wrote {html}")
    say({"summary": told, "report": report}, lines, json)
    raise typer.Exit(int(told["differs"] > threshold * told["samples"] or told["unverified"] > allow_unverified))


def _between(since: str | None, until: str | None) -> tuple[float, float]:
    begin = -math.inf if since is None else moment("--since", since)
    return begin, math.inf if until is None else moment("--until", until)


def _schedule(journal: str, ids: list[str] | None, begin: float, end: float, json: bool) -> int:
    """The exit code: 1 if a promise was broken."""
    from .replay_checks import schedule_from

    schedule = schedule_from(journal, ids, begin, end, _complain)
    say(schedule.as_data(), schedule.lines(), json)
    return int(bool(schedule.violations))


def _say_each(verdicts: list[Verdict], json: bool) -> None:
    from ..replay import as_data, as_line, worst_of

    worst = verdicts if json else worst_of(verdicts, SHOWN)
    for verdict in worst:
        say(as_data(verdict), [as_line(verdict)], json)
    if left := len(verdicts) - len(worst):
        typer.echo(f"and {left} samples that are no worse; --json has all")


SHOWN = 20
"""Samples that get a line of their own."""
TAKEN = {
    "--queued": {"--version", "--limit"},
    "--score-every": set[str](),
    "--depth schedule": {"ID", "--since", "--until"},
}
"""Of the options that choose samples, those that a kind of replay takes; other kinds take all."""


def _check(
    depth: str,
    kinds: dict[str, bool],
    chosen_by: dict[str, Any],
    loss: str | None,
    journal: str | None,
    pool: str | None,
    html: Path | None,
) -> None:
    """Raise InvalidField or ConfigError for options that do not fit together, and for one that would be passed over.

    kinds: of replay, and whether each was asked for. chosen_by: values of the options that choose samples.
    """
    from ...messages.errors import ConfigError, InvalidField

    if depth not in (depths := (*DEPTHS, "loss", "schedule")):
        raise InvalidField("--depth", depth, f"one of {', '.join(depths)}")
    asked = [kind for kind, given in (kinds | {f"--depth {depth}": depth != "tokens"}).items() if given]
    together = " and ".join(asked)
    if ("--depth loss" in asked) is (loss is None):
        raise ConfigError("--depth loss and --loss: give both, or neither")
    if journal is None and "--queued" not in asked:
        raise ConfigError("--journal: give the folder of a journal")
    if len(asked) > 1 and asked != ["--bisect", "--score"]:
        raise ConfigError(f"{together}: give one of them")
    if pool is not None and asked not in ([], ["--queued"]):
        raise ConfigError(f"--pool: nothing is generated in a pool with {together}")
    if html is not None and asked not in ([], ["--score"]):
        raise ConfigError(f"--html: there is no report with {together}")
    for option, value in chosen_by.items():
        if value and together in TAKEN and option not in TAKEN[together]:
            raise ConfigError(f"{option}: {together} takes no such choice")


def _copies(redis: str, pool: str, limit: int | None, settings: Settings, version: int | None, json: bool) -> int:
    """Print what copies of waiting jobs generate. The exit code: 1 if one of them could not be generated."""
    from ..redis import ask
    from ..replay import generate_copies, waiting

    claims = ask(redis, pool, lambda broker: waiting(broker, limit or 100))
    answers = generate_copies(claims, settings, version) if claims else []
    for answer in answers:
        for one in answer.results:
            told = {"sample": f"{one.job_id}.{one.sample}", "finish_reason": one.finish_reason, "text": one.text}
            ids = one.token_ids.tolist()
            shown = one.text if one.text is not None else " ".join(map(str, ids))
            say(told | {"token_ids": ids, "versions": list(one.versions)}, [f"{told['sample']}  {shown}"], json)
        if answer.problem:
            say({"job": answer.job_id, "problem": answer.problem}, [f"{answer.job_id}: {answer.problem}"], json)
    say({"jobs": len(answers)}, [f"{len(answers)} jobs that wait were copied; they wait still"], json)
    return int(any(answer.problem for answer in answers))


def _write(html: Path, report: dict[str, Any]) -> None:
    with writing("--html", html):
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(as_html(report), encoding="utf-8")


def _verdicts(chosen: list[Recorded], settings: Settings, depth: str, redis: str, pool: str | None) -> list[Verdict]:
    """From an engine of this process, or from a pool."""
    if pool is None:
        return DEPTHS[depth](chosen, settings)
    from ..redis import reach
    from ..replay.pool import replay_on_pool

    reach(redis, pool)
    return replay_on_pool(chosen, redis, pool, settings.limits)


def _weights(settings: Settings, pool: str | None) -> str:
    if pool is not None:
        return f"those that pool {pool} has now"
    if settings.weights is not None:
        return f"{settings.weights}, in place of every version"
    return "the recorded versions" + (f", from {settings.snapshots}" if settings.snapshots else "")


def _report(
    verdicts: list[Verdict],
    unread: list[str],
    about: dict[str, str],
    settings: Settings,
    journal: str,
    text_of: TextOf | None,
) -> dict[str, Any]:
    """The report's data. text_of: None shows ids."""
    from ...messages.redis import redacted
    from ..replay import Report

    command = shlex.join(["rolloutmq", *map(redacted, sys.argv[1:])])
    report = Report({"command": command} | about, limits=settings.limits, journal=journal)
    for verdict in verdicts:
        report.add(verdict)
    for line in unread:
        report.add_unread(line)
    return report.as_data(text_of)


def _texts(tokenizer: str | None, model: str | None) -> TextOf | None:
    """Of the tokenizer that was named, or that of a model's folder if it has one. Raises ConfigError."""
    from ...messages.errors import ConfigError
    from ..journal import texts_of

    if tokenizer is not None:
        return texts_of(tokenizer)
    try:
        return texts_of(model) if model is not None and Path(model).is_dir() else None
    except ConfigError:
        return None


def _chosen(folder: str, ids: list[str], limit: int | None, **filters: Any) -> list[Recorded]:
    """The samples that were asked for. Raises InvalidField for an id without one."""
    from itertools import islice

    from ...messages.errors import InvalidField

    jobs = {part for name in ids for part in (name, re.sub(r"\.\d+$", "", name))} or None
    found: Iterator[Recorded] = recorded(folder, jobs=jobs, **filters)
    if ids:
        found = (one for one in found if {one.name, one.result.job_id} & set(ids))
    chosen = list(islice(found, limit))
    if limit is None and (missing := set(ids) - {name for one in chosen for name in (one.name, one.result.job_id)}):
        raise InvalidField("ID", min(missing), f"a job or sample in {folder} that fits the other options")
    return chosen


def _complain(problem: str) -> None:
    typer.secho(printable(problem), fg="yellow", err=True)
