"""Evaluation of a pool's weights, version after version, on the same prompts."""

from __future__ import annotations

import hashlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ....messages.broker import Broker
from ....messages.errors import ConfigError, InvalidField
from ....messages.ids import derived_id, new_id
from ....messages.model import Float, GenerateJob, Int, JobFailure, RolloutResult
from ....producer import RolloutClient
from ....producer.data import as_error, told
from ....sync.transfer import Ledger
from ...files import json_lines, lines
from ...records import Records
from ...submit import Defaults, line_fields
from .operation import Context, HostPath, operation

SCORERS = "ROLLOUTMQ_SCORERS"
"""NAME=MODULE:FUNCTION, separated by commas: what a worker may score with. A job names one and brings no code."""
Scorer = Callable[[dict[str, Any], RolloutResult], float]
Scores = dict[int, dict[int, list[float]]]
"""version -> number of the prompt's line -> the scores of its samples"""


@operation(
    timeout_s=24 * 3600,
    found_trouble=lambda result: bool(result["failed"] or result["unscored"] or result["missing"]),
)
async def eval_sweep(
    context: Context,
    *,
    prompts: HostPath,
    out: HostPath,
    scorer: Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,64}$")],
    n: Annotated[Int, Field(ge=1, le=4096)] = 1,
    max_new_tokens: Annotated[Int, Field(ge=1)] = 256,
    temperature: Annotated[Float, Field(ge=0)] = 1.0,
    window: Annotated[Int, Field(ge=1, le=4096)] = 256,
    draws: Annotated[Int, Field(ge=100, le=100_000)] = 2000,
    confidence: Annotated[Float, Field(gt=0, lt=1)] = 0.95,
    seed: Annotated[Int, Field(ge=0)] = 0,
) -> dict[str, Any]:
    """Score a file of prompts under the pool's version, and compare it with the versions scored before.

    prompts: a file as of `rolloutmq submit`; a line may have a `reference` for the scorer. out: file for the scores; a
    later run adds the version that the pool has then. scorer: a name in the worker's $ROLLOUTMQ_SCORERS. n,
    max_new_tokens, temperature: for lines without their own. draws, confidence, seed: of the bootstrap.

    The file says which samples have a score; jobs' ids follow from the sweep, the version and the line.
    """
    score = _scorer(scorer)
    if "version" not in context.notes:
        context.note(version=await _served(context))
    version = int(context.notes["version"])
    defaults = Defaults(n=n, max_new_tokens=max_new_tokens, temperature=temperature)
    sweep = _Sweep(Path(prompts), Path(out), scorer, defaults, version)
    try:
        client = RolloutClient(
            context.redis_url, context.pool, client_id=f"eval-{sweep.id}-{version}", before_ack=sweep.records.sync
        )
        async with client:
            async for outcome in client.map(sweep.jobs(), window=window):
                sweep.take(outcome, score)
                context.progress(sweep.done, sweep.total, f"version {version}")
        sweep.records.sync(now=True)
        context.progress(sweep.done, sweep.total, f"version {version}", now=True)
        return sweep.result(lambda values: interval(values, draws, confidence, seed))
    finally:
        sweep.records.close()


async def _served(context: Context) -> int:
    """The newest version that a worker serves; without workers, the committed one."""
    workers = await Broker(context.redis, context.pool).workers()
    served = [worker.version for worker in workers]
    return max(served) if served else await Ledger(context.redis, context.pool).committed()


def _scorer(name: str) -> Scorer:
    """The worker's function of that name. Raises InvalidField for one that it does not have, and ConfigError."""
    known = dict(entry.split("=", 1) for entry in os.environ.get(SCORERS, "").split(",") if "=" in entry)
    if name not in known:
        raise InvalidField("scorer", name, f"one of ${SCORERS} of the worker: {', '.join(known) or 'it has none'}")
    module, _, function = known[name].partition(":")
    try:
        found: Scorer = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever importing the user's module raises
        raise ConfigError(f"${SCORERS}: {known[name]}: {told(error)}") from error
    return found


class _Sweep:
    """The prompts, and the file: its first line has the sweep's id and what was asked for, each other line a sample.

    Raises InvalidField or ConfigError for prompts that are no jobs, and for a file that is not this sweep's.
    """

    def __init__(self, prompts: Path, out: Path, scorer: str, defaults: Defaults, version: int) -> None:
        self._version = version
        self._prompts, digest = _read(prompts, defaults)
        self.total = sum(fields["n"] for _, fields in self._prompts.values())
        self.scores: Scores = {}
        self._taken: set[tuple[int, int, int]] = set()
        self._counts = {"failed": 0, "unscored": 0, "mixed": 0}
        asked = {"scorer": scorer, "n": defaults.n, "max_new_tokens": defaults.max_new_tokens}
        asked |= {"temperature": defaults.temperature, "prompts": digest}
        begin = {"sweep": new_id()}
        self.records = Records("out", out, "evaluation", asked=asked, begin=begin, restore=self._restore)

    def _restore(self, first: dict[str, Any], records: list[Any]) -> None:
        self.id = str(first["sweep"])
        int(self.id, 16)
        for record in records:
            self._note(record)

    @property
    def done(self) -> int:
        return sum(version == self._version for version, _, _ in self._taken)

    def jobs(self) -> Iterator[GenerateJob]:
        """A job for each prompt that lacks a score under this version."""
        for number, (_, fields) in self._prompts.items():
            if any((self._version, number, sample) not in self._taken for sample in range(fields["n"])):
                yield GenerateJob(
                    **fields, id=self._id_of(number), min_version=self._version, metadata={"line": number}
                )

    def _id_of(self, number: int) -> str:
        digest = hashlib.sha256(f"{self.id} {self._version} {number}".encode()).digest()
        return derived_id(int(self.id[:12], 16), digest)

    def take(self, outcome: RolloutResult | JobFailure, score: Scorer) -> None:
        """Score a sample and write it down."""
        number = outcome.metadata.get("line")
        if not isinstance(number, int) or number not in self._prompts or outcome.job_id != self._id_of(number):
            return
        record: dict[str, Any] = {"round": self._version, "line": number}
        if isinstance(outcome, RolloutResult):
            if (self._version, number, outcome.sample) in self._taken:
                return
            record |= {"sample": outcome.sample, "versions": list(outcome.versions), "tokens": outcome.token_ids.size}
            record |= _scored(score, self._prompts[number][0], outcome)
            self._add(record)
            return
        for sample in range(self._prompts[number][1]["n"]):
            if (self._version, number, sample) not in self._taken:
                self._add(record | {"sample": sample, "error": str(outcome)})

    def _add(self, record: dict[str, Any]) -> None:
        self.records.write(record)
        self._note(record)

    def _note(self, line: dict[str, Any]) -> None:
        self._taken.add((line["round"], line["line"], line["sample"]))
        if "versions" not in line:
            self._counts["failed"] += 1
        elif "score" not in line:
            self._counts["unscored"] += 1
        elif len(line["versions"]) != 1:
            self._counts["mixed"] += 1  # of no single version
        else:
            of_version = self.scores.setdefault(line["versions"][0], {})
            of_version.setdefault(line["line"], []).append(float(line["score"]))

    def result(self, of: Callable[[list[float]], dict[str, float | None]]) -> dict[str, Any]:
        """Of each version mean and interval, and of each one but the first its difference to the one before."""
        versions: list[dict[str, Any]] = []
        means: dict[int, dict[int, float]] = {}
        for version in sorted(self.scores):
            means[version] = {line: float(np.mean(scores)) for line, scores in self.scores[version].items()}
            samples = sum(map(len, self.scores[version].values()))
            row = {"version": version, "prompts": len(means[version]), "samples": samples}
            versions.append(row | of(list(means[version].values())))
        differences = []
        for before, after in zip(sorted(means), sorted(means)[1:], strict=False):
            both = sorted(means[before].keys() & means[after].keys())
            row = {"version": after, "before": before, "prompts": len(both)}
            differences.append(row | of([means[after][line] - means[before][line] for line in both]))
        missing = self.total - self.done  # taken from the pool by somebody else
        where = {"sweep": self.id, "out": str(self.records.path), "version": self._version, "missing": missing}
        return where | {"versions": versions, "differences": differences} | self._counts


def interval(values: list[float], draws: int, confidence: float, seed: int) -> dict[str, float | None]:
    """mean, low and high, by resampling; the same for the same values, and None where there are too few of them.

    Samples of one prompt belong together, so a value is the mean of a prompt's samples.
    """
    if not values:
        return {"mean": None, "low": None, "high": None}
    given, draw = np.array(values), np.random.default_rng(seed)
    if len(values) == 1:
        return {"mean": float(given[0]), "low": None, "high": None}
    means: npt.NDArray[np.float64] = np.array(
        [given[draw.integers(len(given), size=len(given))].mean() for _ in range(draws)]
    )
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return {"mean": float(given.mean()), "low": float(low), "high": float(high)}


def _read(prompts: Path, defaults: Defaults) -> tuple[dict[int, tuple[dict[str, Any], dict[str, Any]]], str]:
    """Each line as it is and as a job's fields, by its number, and the file's digest."""
    digest = hashlib.sha256()

    def raw() -> Iterator[bytes]:
        for line in lines("prompts", prompts):
            digest.update(line)
            yield line

    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    for number, given in json_lines(raw()):
        line = given if isinstance(given, dict) else {"text": given}
        asked = {name: value for name, value in line.items() if name != "reference"}
        found[number] = line, line_fields(f"line {number}", asked, defaults)
    if not found:
        raise ConfigError(f"{prompts} has no prompts")
    return found, digest.hexdigest()


def _scored(score: Scorer, line: dict[str, Any], result: RolloutResult) -> dict[str, Any]:
    """The score, or why there is none: one sample must not end the others."""
    try:
        value = float(score(line, result))
    except BaseException as raised:  # of the user's function
        return {"error": told(as_error(raised))[:500].encode(errors="replace").decode()}
    return {"score": value} if math.isfinite(value) else {"error": f"a score of {value}"}
