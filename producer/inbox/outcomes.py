"""What a client hands out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...messages.broker import Reply
from ...messages.model import JobFailure, RolloutResult

Outcome = RolloutResult | JobFailure


@dataclass(frozen=True, slots=True)
class JobHandle:
    """A submitted job. state: "new", or what an earlier submission of the same id is ("q", "r", "done", …)."""

    job_id: str
    group_id: str
    n: int
    state: str = "new"


@dataclass(frozen=True, slots=True)
class Group:
    """All that came of a group's jobs: results by job in the order of submission, then by sample."""

    group_id: str
    results: tuple[RolloutResult, ...]
    failures: tuple[JobFailure, ...]

    @property
    def ok(self) -> bool:
        """Whether every sample is there."""
        return not self.failures


def as_group(group_id: str, replies: Iterable[Reply]) -> Group:
    """The group, or one job as a group, of which these are the outcomes."""
    outcomes = [reply.outcome for reply in replies]
    return Group(
        group_id,
        tuple(outcome for outcome in outcomes if isinstance(outcome, RolloutResult)),
        tuple(outcome for outcome in outcomes if isinstance(outcome, JobFailure)),
    )
