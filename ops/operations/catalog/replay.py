"""Bulk replay: a journal's samples against the pool that there is, with a verdict on each in a file."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator

from ....messages.errors import ConfigError, InvalidField
from ....messages.ids import new_id
from ....messages.model import Float, Int
from ....producer import RolloutClient
from ...records import Records
from ...replay import Recorded, Verdict, Where, recorded
from ...replay.pool import WINDOW, client_of, replayed
from .operation import Check, Context, Operation, Params, operation

TOLD = 20
"""The result has at most so many reasons and problems."""
STATES = ("same", "differs", "unverified")
Ids = Annotated[tuple[str, ...], BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)]


class ReplayParams(Params):
    """journal: a folder on the worker's host. out: file for the verdicts there, a JSON line each; a run that was cut
    off goes on with it. jobs, where, since, until: which samples, see `ops.replay.recorded`; times in Unix seconds.
    limit: most jobs. window: most jobs in the pool at a time. logprob: the largest difference that counts as none."""

    journal: str = Field(pattern="^/")
    out: str = Field(pattern="^/")
    jobs: Ids = ()
    where: str = ""
    since: Float | None = None
    until: Float | None = None
    limit: Int = Field(default=1000, ge=1, le=100_000)
    window: Int = Field(default=WINDOW, ge=1, le=4096)
    logprob: Float = Field(default=1e-5, ge=0)

    @field_validator("where")
    @classmethod
    def _where_is_one(cls, text: str) -> str:
        if text:
            Where(text)
        return text


@operation
class Replay(Operation[ReplayParams]):
    """Generate a journal's samples again on this pool, each job once, and write down how they differ."""

    name = "replay"
    params = ReplayParams
    timeout_s = 24 * 3600

    async def run(self, context: Context, params: ReplayParams) -> dict[str, Any]:
        """The file says which samples have their verdict; the jobs' ids follow from the replay's, which it has too."""
        problems: list[str] = []
        file = _Verdicts(params)
        try:
            found = await context.blocking(lambda check: _chosen(params, file.until, problems, check))
            chosen = [one for one in found if _place(one) not in file.done]
            total = len(file.done) + len(chosen)
            client = RolloutClient(
                context.redis_url, context.pool, client_id=client_of(file.replay_id), before_ack=file.records.sync
            )
            async with client:
                async for verdict in replayed(
                    client, chosen, file.replay_id, limit=params.logprob, window=params.window
                ):
                    file.take(verdict)
                    context.progress(len(file.done), total, file.said())
            file.records.sync(now=True)
            context.progress(len(file.done), total, file.said(), now=True)
            return file.result() | {"problems": list(dict.fromkeys(problems))[:TOLD]}
        finally:
            file.records.close()

    def found_trouble(self, result: dict[str, Any]) -> bool:
        return bool(result["differs"] or result["unverified"] or not result["same"])


def _chosen(params: ReplayParams, until: float, problems: list[str], check: Check) -> list[Recorded]:
    """The samples of the first `limit` jobs that fit. Raises ConfigError if the journal cannot be read."""
    jobs: set[str] = set()
    found: list[Recorded] = []
    for one in recorded(
        params.journal,
        jobs=params.jobs or None,
        since=-math.inf if params.since is None else params.since,
        until=until,
        where=Where(params.where) if params.where else None,
        on_problem=problems.append,
    ):
        check()
        if len(jobs) < params.limit or one.result.job_id in jobs:
            jobs.add(one.result.job_id)
            found.append(one)
    return found


def _place(one: Recorded) -> tuple[str, int]:
    return one.result.job_id, one.result.sample


class _Verdicts:
    """The file: its first line has the replay's id and what was asked for, each other line a verdict.

    Raises InvalidField or ConfigError for a file that is not this replay's.
    """

    def __init__(self, params: ReplayParams) -> None:
        self.records = Records("out", Path(params.out), "replay")
        self.done: set[tuple[str, int]] = set()
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        asked = params.model_dump(mode="json", exclude={"out", "window"})
        try:
            self.replay_id, self.until = self._resume(asked) or self._begin(asked)
        except BaseException:
            self.records.close()
            raise

    def _begin(self, asked: dict[str, Any]) -> tuple[str, float]:
        # What the journal gets from here on is left out: a run that goes on later would choose other samples.
        replay_id, until = new_id(), time.time() if asked["until"] is None else asked["until"]
        self.records.write({"replay": replay_id, "at": time.time(), "until": until, "asked": asked})
        self.records.sync(now=True)
        return replay_id, until

    def _resume(self, asked: dict[str, Any]) -> tuple[str, float] | None:
        path = self.records.path
        try:
            lines, torn = self.records.read()
            if not lines and not torn:
                return None
            first, *verdicts = lines
            replay_id, until, before = str(first["replay"]), float(first["until"]), first["asked"]
            for line in verdicts:
                self._note(line["job"], line["sample"], line["state"], line["reasons"])
        except (InvalidField, LookupError, TypeError, ValueError, AttributeError):
            raise ConfigError(f"{path} is no file of a replay; name another one") from None
        if before != asked:
            raise ConfigError(f"{path} has a replay that was asked for {before}; give the same, or another file")
        self.records.drop_torn_end()
        return replay_id, until

    def take(self, verdict: Verdict) -> None:
        job_id, sample = _place(verdict.recorded)
        gap = verdict.largest_gap
        self.records.write(
            {
                "job": job_id,
                "sample": sample,
                "state": verdict.state,
                "first": verdict.first,
                "version": verdict.version,
                "tokens": len(verdict.token_ids),
                "largest_gap": None if math.isnan(gap) else gap,
                "finish": verdict.finish,
                "reasons": list(verdict.reasons),
            }
        )
        self._note(job_id, sample, verdict.state, verdict.reasons)

    def _note(self, job_id: str, sample: int, state: str, reasons: Any) -> None:
        self.done.add((job_id, sample))
        self._states[state] += 1
        self._reasons.update(reasons)

    def said(self) -> str:
        return ", ".join(f"{self._states[state]} {state}" for state in STATES)

    def result(self) -> dict[str, Any]:
        counted = {state: self._states[state] for state in STATES}
        told = {"reasons": dict(self._reasons.most_common(TOLD))}
        return {"replay": self.replay_id, "out": str(self.records.path), "samples": len(self.done)} | counted | told
