"""Bulk replay: a journal's samples against the pool that there is, with a verdict on each in a file."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ....messages.ids import new_id
from ....messages.model import Float, Int
from ....producer import RolloutClient
from ...records import Records
from ...replay import Recorded, Verdict, Where, recorded
from ...replay.pool import WINDOW, client_of, replayed
from .operation import Check, Commas, Context, HostPath, operation

TOLD = 20
"""The result has at most so many reasons and problems."""
STATES = ("same", "differs", "unverified")


def _a_where(text: str) -> str:
    if text:
        Where(text)
    return text


@operation(
    timeout_s=24 * 3600,
    found_trouble=lambda result: bool(result["differs"] or result["unverified"] or not result["same"]),
)
async def replay(
    context: Context,
    *,
    journal: HostPath,
    out: HostPath,
    jobs: Annotated[tuple[str, ...], Commas] = (),
    where: Annotated[str, AfterValidator(_a_where)] = "",
    since: Float | None = None,
    until: Float | None = None,
    limit: Annotated[Int, Field(ge=1, le=100_000)] = 1000,
    window: Annotated[Int, Field(ge=1, le=4096)] = WINDOW,
    logprob: Annotated[Float, Field(ge=0)] = 1e-5,
) -> dict[str, Any]:
    """Generate a journal's samples again on this pool, each job once, and write down how they differ.

    out: file for the verdicts, a JSON line each; a run that was cut off goes on with it. jobs, where, since, until:
    which samples, see `ops.replay.recorded`; times in Unix seconds. limit: most jobs. window: most jobs in the pool at
    a time. logprob: the largest difference that counts as none.

    The file says which samples have their verdict; the jobs' ids follow from the replay's, which it has too.
    """
    problems: list[str] = []
    asked = {"journal": journal, "jobs": list(jobs), "where": where, "since": since, "until": until, "limit": limit}
    file = _Verdicts(Path(out), asked | {"logprob": logprob})
    begin = -math.inf if since is None else since

    def choose(check: Check) -> list[Recorded]:
        fits = Where(where) if where else None
        found = recorded(journal, jobs=jobs or None, since=begin, until=file.until, where=fits,
                         on_problem=problems.append)  # fmt: skip
        return [one for one in _first_jobs(found, limit, check) if _place(one) not in file.done]

    try:
        chosen = await context.blocking(choose)
        total = len(file.done) + len(chosen)
        client = RolloutClient(
            context.redis_url, context.pool, client_id=client_of(file.replay_id), before_ack=file.records.sync
        )
        async with client:
            async for verdict in replayed(client, chosen, file.replay_id, limit=logprob, window=window):
                file.take(verdict)
                context.progress(len(file.done), total, file.said())
        file.records.sync(now=True)
        context.progress(len(file.done), total, file.said(), now=True)
        return file.result() | {"problems": list(dict.fromkeys(problems))[:TOLD]}
    finally:
        file.records.close()


def _first_jobs(found: Iterable[Recorded], limit: int, check: Check) -> Iterator[Recorded]:
    """The samples of the first `limit` jobs."""
    jobs: set[str] = set()
    for one in found:
        check()
        if len(jobs) < limit or one.result.job_id in jobs:
            jobs.add(one.result.job_id)
            yield one


def _place(one: Recorded) -> tuple[str, int]:
    return one.result.job_id, one.result.sample


class _Verdicts:
    """The file: its first line has the replay's id and what was asked for, each other line a verdict."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.done: set[tuple[str, int]] = set()
        self._states: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        # What the journal gets from here on is left out: a run that goes on later would choose other samples.
        until = time.time() if asked["until"] is None else asked["until"]
        begin = {"replay": new_id(), "at": time.time(), "until": until}
        self.records = Records("out", path, "replay", asked=asked, begin=begin, restore=self._restore)

    def _restore(self, first: dict[str, Any], records: list[Any]) -> None:
        self.replay_id, self.until = str(first["replay"]), float(first["until"])
        for record in records:
            self._note(record["job"], record["sample"], record["state"], record["reasons"])

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
