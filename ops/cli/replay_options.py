"""The options of `rolloutmq replay`, and which of them its modes take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...messages.defaults import DEFAULT_URL
from ...messages.errors import ConfigError
from .options import Json, RedisUrl, finite

if TYPE_CHECKING:
    from ..replay import Settings

_CHOICE = frozenset(("names", "journal", "since", "until", "where", "version", "limit"))
_WEIGHTS = frozenset(("snapshots", "weights", "adapters", "model"))
_SCORING = frozenset(("logprob_limit", "mean_limit", "dtype", "device"))
_REPORT = frozenset(("allow_unverified", "threshold", "html", "tokenizer"))
TAKES: dict[str, frozenset[str]] = {
    "tokens": _CHOICE | _WEIGHTS | _REPORT | {"engine", "logprob_limit", "pool", "redis"},
    "score": _CHOICE | _WEIGHTS | _REPORT | _SCORING,
    "follow": _WEIGHTS | _SCORING | {"journal", "score_every"},
    "bisect": _CHOICE | _WEIGHTS | _SCORING | {"engine", "by", "each", "ends"},
    "loss": _CHOICE | {"by"},
    "schedule": frozenset(("names", "journal", "since", "until")),
    "queued": _WEIGHTS | {"engine", "pool", "redis", "version", "limit"},
    "books": frozenset(("names",)),
    "diff": frozenset(("names",)),
}
"""Mode -> what it takes beside --json. What else is given is refused, so that nothing is passed over."""


@dataclass(frozen=True)
class Asked:
    """The arguments and options of the command."""

    mode: Annotated[str, typer.Argument(metavar="MODE", help=f"{', '.join(TAKES)}.")]
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID]...",
            help="Jobs, or samples as JOB.SAMPLE. books: a checkpoint, or a feed's state as JSON. diff: two journals.",
        ),
    ] = None
    journal: Annotated[
        str | None, typer.Option(help="Folder of the journal.", envvar="ROLLOUTMQ_JOURNAL", show_default=False)
    ] = None
    since: Annotated[str, typer.Option(help="Results from then on: 2026-11-23T02:00 (UTC), or 90m ago.")] = ""
    until: Annotated[str, typer.Option(help="Results up to then.")] = ""
    where: Annotated[str | None, typer.Option(help="Expression, such as 'reward < 0 and staleness > 2'.")] = None
    version: Annotated[int | None, typer.Option(min=0, help="Only what these weights sampled; of queued: these.")] = (
        None
    )
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many samples.")] = None
    snapshots: Annotated[str | None, typer.Option(help="Folder with the recorded versions of the weights.")] = None
    weights: Annotated[Path | None, typer.Option(help="A checkpoint to use in place of every version.")] = None
    adapters: Annotated[Path | None, typer.Option(help="Folder with a folder NAME@VERSION of each adapter.")] = None
    model: Annotated[str | None, typer.Option(help="Base model, version 0; default: as the samples say.")] = None
    engine: Annotated[
        list[str] | None, typer.Option(help="NAME=JSON, a setting of the engine, as of `rolloutmq worker`; repeatable.")
    ] = None
    pool: Annotated[
        str | None, typer.Option(help="tokens: generate in this pool, with its weights. queued: whose jobs.")
    ] = None
    redis: RedisUrl = DEFAULT_URL
    logprob_limit: Annotated[
        float | None,
        typer.Option(min=0, callback=finite, help="Largest difference of log-probabilities: 1e-5, or 1e-4 of a score."),
    ] = None
    mean_limit: Annotated[
        float, typer.Option(min=0, callback=finite, help="Largest mean difference where not all is float32.")
    ] = 0.05
    dtype: Annotated[str, typer.Option(help="Of the forward pass that scores.")] = "float32"
    device: Annotated[str, typer.Option(help="Where it runs, such as cuda:0.")] = "cpu"
    score_every: Annotated[int, typer.Option(min=1, help="follow: score every so many samples that arrive.")] = 1000
    by: Annotated[
        str, typer.Option(help="bisect: tokens, score, 'NAME<NUMBER' or MODULE:FUNCTION. loss: MODULE:FUNCTION.")
    ] = "tokens"
    each: Annotated[int, typer.Option(min=1, help="bisect: samples to replay of each version and worker.")] = 8
    ends: Annotated[bool, typer.Option("--ends", help="bisect: test the oldest and newest version, too.")] = False
    allow_unverified: Annotated[int, typer.Option(min=0, help="So many unverified samples are no failure.")] = 0
    threshold: Annotated[
        float, typer.Option(min=0, max=1, callback=finite, help="Share of the samples that may differ.")
    ] = 0.0
    html: Annotated[Path | None, typer.Option(help="Write a report as one HTML page here.")] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Model or tokenizer.json for the report's texts; default: --model, if a folder."),
    ] = None
    json: Json = False

    @property
    def folder(self) -> str:
        """The journal's. Raises ConfigError without one."""
        if self.journal is None:
            raise ConfigError("--journal: give the folder of a journal")
        return self.journal

    @property
    def settings(self) -> Settings:
        """Raises InvalidField."""
        from ..flags import parse_extra
        from ..replay import Settings

        names = ("model", "snapshots", "weights", "adapters", "mean_limit", "dtype", "device")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names}
        asked["snapshots"] = Path(self.snapshots) if self.snapshots is not None else None
        if self.logprob_limit is not None:
            asked |= {"logprob_limit": self.logprob_limit, "score_limit": self.logprob_limit}
        return Settings(engine=parse_extra(self.engine or []), **asked)
