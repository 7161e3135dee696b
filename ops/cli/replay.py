"""`rolloutmq replay MODE`: recorded samples are chosen from a journal, and the mode says what is done with them.

The function of a mode's name takes what was asked, and gives the exit code.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import typer

from ...messages.errors import ConfigError, InvalidField
from ..files import check_out, writing
from ..replay import (
    BADNESS,
    Recorded,
    Settings,
    Verdict,
    Where,
    recorded,
    replay_tokens,
    replaying,
    report_of,
    summary,
)
from ..replay.checks import (
    EVENTS,
    Bisected,
    Diff,
    Follower,
    Losses,
    Schedule,
    by_version,
    gaps_of,
    losses_of,
    metric,
    replays,
    schedule_of,
    users,
)
from ..replay.checks import bisect as bisected
from ..replay.checks import diff as compared
from ..replay.checks import score as scored
from ..terminal import ProgressLine, printable
from .journal import complain, window
from .options import derived, given, say
from .replay_options import TAKES, Asked

if TYPE_CHECKING:
    from ..journal import TextOf

FOLLOW_S = 5.0
"""Between two looks at a journal that is followed."""
SHOWN = 20
"""Samples that get a line of their own."""


def tokens(asked: Asked) -> int:
    """By an engine of this process, or by a pool."""
    pool = asked.pool
    return _judged(asked, replay_tokens if pool is None else lambda *given: _in_pool(asked.redis, pool, *given))


def score(asked: Asked) -> int:
    return _judged(asked, scored)


def follow(asked: Asked) -> NoReturn:
    follower = Follower(asked.folder, asked.score_every, asked.settings)
    try:
        while True:
            if follower.round():
                typer.echo(printable(follower.line()))
            time.sleep(FOLLOW_S)
    finally:
        follower.close()


def bisect(asked: Asked) -> int:
    samples, _ = _chosen(asked)
    if not samples:
        raise InvalidField("versions", "none", "samples that can be read")
    name, is_metric, below = asked.by.partition("<")
    settings = asked.settings if is_metric else asked.settings.for_model_of(samples)
    found = by_version(samples, asked.each if asked.by in ("tokens", "score") else None)
    also = {min(found), max(found)} if asked.ends and found else set[int]()
    with ExitStack() as stack:
        if is_metric:
            broken, also = metric(found, name.strip(), below), set(found)  # the journal has them all
        elif asked.by == "score":
            broken = replays(found, lambda chosen: scored(chosen, settings))
        elif asked.by == "tokens":
            broken = replays(found, stack.enter_context(replaying(samples, settings)))
        else:
            broken = users(found, settings, asked.by)
        return _tell(bisected(list(found), broken, also=also), asked)


def loss(asked: Asked) -> int:
    found = losses_of(_chosen(asked)[0], asked.by)
    return _tell(found, asked) or (0 if found.samples else 2)


def schedule(asked: Asked) -> int:
    """Of some jobs only what is about them, and no weights and workers."""
    from ...messages.journal import read

    begin, end = window(asked.since, asked.until)
    jobs = asked.names or None
    found = schedule_of(read(asked.folder, job=jobs, events=EVENTS, since=begin, until=end, on_problem=complain))
    return _tell(found, asked) or int(bool(found.violations))


def queued(asked: Asked) -> int:
    """1 if one of the copies could not be generated."""
    from ..redis import ask
    from ..replay import generate_copies, waiting

    claims = ask(asked.redis, asked.pool or "default", lambda broker: waiting(broker, asked.limit or 100))
    answers = generate_copies(claims, asked.settings, asked.version) if claims else []
    for answer in answers:
        for one in answer.results:
            told = {"sample": f"{one.job_id}.{one.sample}", "finish_reason": one.finish_reason, "text": one.text}
            ids = one.token_ids.tolist()
            shown = one.text if one.text is not None else " ".join(map(str, ids))
            say(told | {"token_ids": ids, "versions": list(one.versions)}, [f"{told['sample']}  {shown}"], asked.json)
        if answer.problem:
            problem = {"job": answer.job_id, "problem": answer.problem}
            say(problem, [f"{answer.job_id}: {answer.problem}"], asked.json)
    say({"jobs": len(answers)}, [f"{len(answers)} jobs that wait were copied; they wait still"], asked.json)
    return int(any(answer.problem for answer in answers))


def books(asked: Asked) -> int:
    from ..books import books_lines, read_books

    if asked.names is None or len(asked.names) != 1:
        raise ConfigError("replay books: give one file, or the folder of one of TRL's checkpoints")
    found = read_books("FILE", Path(asked.names[0]))
    say(found.report(), books_lines(found), asked.json)
    return 0


def diff(asked: Asked) -> int:
    """1 if the runs are not one."""
    if asked.names is None or len(asked.names) != 2:
        raise ConfigError("replay diff: give the folders of two journals")
    found = compared((asked.names[0], asked.names[1]), complain)
    return _tell(found, asked) or int(bool(found.parts))


def _chosen(asked: Asked) -> tuple[list[Recorded], list[str]]:
    """The samples that were asked for, and a line for each that cannot be read. Raises InvalidField for an id without
    one, and ConfigError if there are none."""
    unread: list[str] = []

    def note(line: str) -> None:
        unread.append(line)
        complain(line)

    begin, end = window(asked.since, asked.until)
    names, where = set(asked.names or ()), Where(asked.where) if asked.where is not None else None
    found = recorded(asked.folder, jobs=names or None, version=asked.version, since=begin, until=end, where=where,
                     on_problem=complain, on_unread=note)  # fmt: skip
    chosen = list(islice(found, asked.limit))
    if asked.limit is None and (missing := names - {name for one in chosen for name in (one.name, one.result.job_id)}):
        raise InvalidField("ID", min(missing), f"a job or sample in {asked.folder} that fits the other options")
    if not chosen and not unread:
        raise ConfigError(f"{asked.folder} has no such sample")
    return chosen, unread


def _tell(found: Bisected | Diff | Losses | Schedule, asked: Asked) -> int:
    from ..journal import plain

    say(plain(asdict(found)), found.lines(), asked.json)
    return 0


def _in_pool(redis: str, pool: str, samples: Sequence[Recorded], settings: Settings) -> list[Verdict]:
    from ..redis import reach
    from ..replay.pool import replay_on_pool

    reach(redis, pool)
    return replay_on_pool(samples, redis, pool, settings.logprob_limit, settings.moved)


def _judged(asked: Asked, judge: Callable[[Sequence[Recorded], Settings], list[Verdict]]) -> int:
    """The verdict on each sample, and the report. 1 if more of them differ, or are unverified, than may."""
    if asked.html is not None:
        check_out("--html", asked.html)
    text_of = _texts(asked) if asked.json or asked.html is not None else None
    settings = asked.settings
    samples, unread = _chosen(asked)
    with ProgressLine() as line:
        moved = line.counting(sum(len(one.result.token_ids) for one in samples), "tokens")
        verdicts = judge(samples, replace(settings, moved=moved)) if samples else []
    _say_each(verdicts, asked.json)
    if asked.mode == "score":
        from ..journal import plain

        gaps = gaps_of(verdicts, settings)
        say({"gaps": plain(asdict(gaps))}, gaps.lines(), asked.json)
    told, report = summary(verdicts, len(unread)), dict[str, Any]()
    counts = ", ".join(f"{told[state]} {state}" for state in ("same", "differs", "unverified"))
    lines = [f"{told['samples']} samples, {told['tokens']} tokens: {counts}"]
    if asked.json or asked.html is not None:
        limit = settings.score_limit if asked.mode == "score" else settings.logprob_limit
        report = report_of(
            verdicts, _about(asked, settings), limit=limit, journal=asked.folder, unread=unread, text_of=text_of
        )
    if asked.html is not None:
        from ..dashboard import as_page

        with writing("--html", asked.html):
            asked.html.parent.mkdir(parents=True, exist_ok=True)
            asked.html.write_text(as_page({"replay": report}), encoding="utf-8")
        lines.append(f"wrote {asked.html}")
    say({"summary": told, "report": report}, lines, asked.json)
    failed = told["differs"] > asked.threshold * told["samples"] or told["unverified"] > asked.allow_unverified
    return int(failed)


def _say_each(verdicts: Sequence[Verdict], json: bool) -> None:
    """For people only the worst ones, in the order of all."""
    worst = sorted(range(len(verdicts)), key=lambda at: -BADNESS[verdicts[at].state])
    shown = verdicts if json else [verdicts[at] for at in sorted(worst[:SHOWN])]
    for verdict in shown:
        say(verdict.as_data(), [verdict.line()], json)
    if left := len(verdicts) - len(shown):
        typer.echo(f"and {left} samples that are no worse; --json has all")


def _about(asked: Asked, settings: Settings) -> dict[str, str]:
    """What was compared with what."""
    from ...messages.redis import redacted

    weights = "the recorded versions" + (f", from {settings.snapshots}" if settings.snapshots else "")
    if settings.weights is not None:
        weights = f"{settings.weights}, in place of every version"
    if asked.pool is not None:
        weights = f"those that pool {asked.pool} has now"
    command = shlex.join(["rolloutmq", *map(redacted, sys.argv[1:])])
    return {"command": command, "mode": asked.mode, "weights": weights, "model": asked.model or "as recorded"}


def _texts(asked: Asked) -> TextOf | None:
    """Of the tokenizer that was named, or that of a model's folder if it has one. Raises ConfigError."""
    from ..journal import texts_of

    if asked.tokenizer is not None:
        return texts_of(asked.tokenizer)
    try:
        return texts_of(asked.model) if asked.model is not None and Path(asked.model).is_dir() else None
    except ConfigError:
        return None


MODES: dict[str, Callable[[Asked], int]] = {
    one.__name__: one for one in (tokens, score, follow, bisect, loss, schedule, queued, books, diff)
}


def _replay(context: typer.Context, **options: Any) -> None:
    asked = Asked(**options)
    if asked.mode not in TAKES:
        raise InvalidField("MODE", asked.mode, f"one of {', '.join(TAKES)}")
    for option in context.command.params:
        source, name = context.get_parameter_source(str(option.name)), str(option.name)
        if source is not None and source.name == "COMMANDLINE" and name not in TAKES[asked.mode] | {"mode", "json"}:
            raise ConfigError(f"{option.opts[0] if name != 'names' else 'ID'}: replay {asked.mode} does not take it")
    raise typer.Exit(MODES[asked.mode](asked))


_TYPES = get_type_hints(Asked, include_extras=True)
replay = derived(
    _replay,
    [
        given("context", typer.Context),
        *(given(one.name, _TYPES[one.name], None, one.default if one.name != "mode" else ...) for one in fields(Asked)),
    ],
    """Generate or score recorded samples again, and compare.

    \b
    tokens    generate them again with the weights that sampled them, and compare
    score     compute their log-probabilities again with a plain forward pass
    follow    do so with every so many samples that arrive, until Ctrl-C
    bisect    find the version at which they broke
    loss      put them through the trainer's loss function
    schedule  check what the pool promises, from its claims and results
    queued    generate copies of jobs that wait in a pool
    books     show what became of a trainer's samples, from a checkpoint
    diff      find where two runs part, from their journals: step, sample and token

    Exit code 0 if all are the same, 1 if more than --threshold of them differ or one cannot be verified, 2 if nothing
    could be tried. With --json the last line has the report.

    \b
    rolloutmq replay tokens --journal out/journal --snapshots out/snapshots --where 'reward < 0' --limit 100
    rolloutmq replay tokens --journal out/journal --pool default --since 90m --html out/replay.html
    rolloutmq replay score --journal out/journal --snapshots out/snapshots
    rolloutmq replay bisect --journal out/journal --snapshots out/snapshots
    """,
)
