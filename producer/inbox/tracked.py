"""What is known of a job that a client waits for, and the place of each of its outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...messages.broker import Reply
from ...messages.model import GenerateJob, JobFailure, Metadata, TokenIds

FAILURE = -1
"""Stands for a job's failure where others have the number of a sample."""


@dataclass(slots=True)
class Tracked:
    """A job that is not fully delivered. `arrived`: the samples (or FAILURE) seen; `taken` of them were handed out.

    ended: its last outcome has arrived; an earlier client of the same id may have taken others.
    state: "r" until then, afterwards how it ended. guessed: its n is not known, and perhaps not its group.
    accepted: Redis has said that it has the job. If it does not know it later, it has lost it.
    task: it is for its caller alone, and no sample.
    prompt_ids, metadata: as it was submitted, if that is known; else metadata is None. Its outcomes are told both.
    due: its deadline by time.monotonic(), if it has one. Of a job of an earlier client, the latest that it can be.
    """

    job_id: str
    group_id: str
    n: int
    arrived: set[int] = field(default_factory=set)
    taken: int = 0
    ended: bool = False
    state: str = "r"
    guessed: bool = False
    accepted: bool = False
    task: bool = False
    prompt_ids: TokenIds | None = None
    metadata: Metadata | None = None
    due: float | None = None

    def may_be(self, job: GenerateJob) -> bool:
        """Whether nothing that is known of it differs from this job."""
        if (self.n, self.group_id) != (job.n, job.group):
            return False
        mine, its = self.prompt_ids, job.token_ids
        same = mine is its or (mine is not None and its is not None and np.array_equal(mine, its))
        return self.metadata is None or (same and self.metadata == job.metadata)


def place_of(reply: Reply) -> tuple[str, int]:
    """Its job and sample, or FAILURE: replies with the same ones are the same outcome."""
    outcome = reply.outcome
    return outcome.job_id, FAILURE if isinstance(outcome, JobFailure) else outcome.sample
