"""What `rolloutmq replay` does with --score and --bisect, and at the depths loss and schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NoReturn

import typer

from ...messages.errors import ConfigError, InvalidField
from ...messages.journal import read
from ..replay import Recorded, Settings, Verdict, Weights, engine_for, engine_settings
from ..replay.checks import (
    EVENTS,
    Bisected,
    Broken,
    Follower,
    Gaps,
    Losses,
    Schedule,
    Tolerance,
    bisect,
    by_version,
    gaps_of,
    losses_of,
    metric,
    replays,
    schedule_of,
    score,
    users,
)
from ..terminal import printable

FOLLOW_S = 5.0
"""Between two looks at a journal that is followed."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The options of --score. on: whether it was given."""

    on: bool
    limit: float
    mean_limit: float
    dtype: str
    device: str

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(self.limit, self.mean_limit)

    def verdicts(self, samples: Sequence[Recorded], settings: Settings) -> list[Verdict]:
        weights = weights_of(samples, settings)
        return score(samples, weights, tolerance=self.tolerance, dtype=self.dtype, device=self.device)

    def gaps(self, verdicts: Sequence[Verdict]) -> Gaps:
        return gaps_of(verdicts, self.tolerance, self.dtype)


@dataclass(frozen=True, slots=True)
class Property:
    """The options of --bisect. metric and below, or check, or neither for a replay."""

    metric: str | None
    below: float | None
    check: str | None
    each: int
    ends: bool


def weights_of(samples: Sequence[Recorded], settings: Settings) -> Weights:
    """Where the weights of these samples are. Raises ConfigError if nobody says which model they are of."""
    return Weights(str(engine_settings(samples, settings)["model"]), settings)


def found_by_bisect(samples: Sequence[Recorded], settings: Settings, scoring: Scoring, asked: Property) -> Bisected:
    """Raises InvalidField if the oldest and the newest version do not differ, ConfigError."""
    if (asked.metric is None) is not (asked.below is None):
        raise ConfigError("--metric and --below: give both, or neither")
    if asked.metric is not None and asked.check is not None:
        raise ConfigError("--metric and --check: give one of them")
    if not samples:
        raise InvalidField("versions", "none", "samples that can be read")
    whole = asked.metric is not None or asked.check is not None
    found = by_version(samples, None if whole else asked.each)
    also = {min(found), max(found)} if asked.ends and found else set[int]()
    with ExitStack() as stack:
        broken: Broken
        if asked.metric is not None and asked.below is not None:
            broken, also = metric(found, asked.metric, asked.below), set(found)  # the journal has them all
        elif asked.check is not None:
            broken = users(found, weights_of(samples, settings), asked.check)
        elif scoring.on:
            broken = replays(found, lambda chosen: scoring.verdicts(chosen, settings))
        else:
            broken = replays(found, stack.enter_context(engine_for(samples, settings)))
        return bisect(list(found), broken, also=also)


def look(
    samples: Sequence[Recorded], settings: Settings, scoring: Scoring, asked: Property | None, loss: str | None
) -> Bisected | Losses | None:
    """What a bisect or a loss function says; None if neither is asked for. asked: of a bisect. loss: the function."""
    if asked is not None:
        return found_by_bisect(samples, settings, scoring, asked)
    return None if loss is None else losses_of(samples, loss)


def follow(journal: str, every: int, settings: Settings, scoring: Scoring) -> NoReturn:
    """Score every so many samples that arrive, until Ctrl-C. Raises InvalidField, ConfigError."""
    follower = Follower(
        journal, every, lambda samples: scoring.verdicts(samples, settings), scoring.tolerance, scoring.dtype
    )
    try:
        while True:
            if follower.round():
                typer.echo(printable(follower.line()))
            time.sleep(FOLLOW_S)
    finally:
        follower.close()


def schedule_from(
    folder: str, jobs: Sequence[str] | None, since: float, until: float, on_problem: Callable[[str], None]
) -> Schedule:
    """The schedule of a journal. Of some jobs only what is about them, and no weights and workers."""
    entries = read(folder, job=jobs or None, events=EVENTS, since=since, until=until, on_problem=on_problem)
    return schedule_of(entries)
