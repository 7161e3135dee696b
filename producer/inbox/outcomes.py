"""What a client hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...messages.arguments import checks_arguments
from ...messages.broker import Reply
from ...messages.errors import RolloutMQError
from ...messages.model import JobFailure, Metadata, RolloutResult, TokenIds
from ...messages.shown import short_id, shown, told_versions

Outcome = RolloutResult | JobFailure
OPEN_STATES = frozenset({"new", "q", "r"})
"""States of a job at its submission in which its end is still to come."""


@dataclass(frozen=True, slots=True)
class Handle:
    """A submitted job. state: "new", or the state in which an earlier submission of the same id is ("q", "r",
    "done", …)."""

    job_id: str
    group_id: str
    n: int
    state: str = "new"


@checks_arguments()
@dataclass(frozen=True, slots=True)
class JobHandle(Handle):
    """A submitted job of a RolloutClient; `await handle` gives its results.

    The results go to whoever takes them first: this handle, or `results`, `groups` or `wait` of the same client.
    """

    _wait: Callable[[Handle, float | None], Coroutine[Any, Any, list[RolloutResult]]] | None = field(
        default=None, repr=False, compare=False
    )

    async def result(self, timeout: float | None = None) -> list[RolloutResult]:
        """All `n` results, by sample number: the same as `client.wait(handle, timeout)`.

        timeout: seconds; None waits for ever. Raises WaitTimeout (nothing is lost, ask again), JobFailed if the job
        ended without all of its samples, or RolloutMQError if something else took them from the client.
        """
        if self._wait is None:
            raise RolloutMQError(f"the handle of job {self.job_id} does not come from a client: use client.wait")
        return await self._wait(self, timeout)

    def __await__(self) -> Generator[Any, Any, list[RolloutResult]]:
        return self.result().__await__()


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

    @property
    def prompt_ids(self) -> TokenIds | None:
        """(p,) int32: the prompt that all of the group's outcomes share; None if they do not, or do not know it."""
        first, *others = [outcome.prompt_ids for outcome in self._outcomes] or [None]
        if first is None or not all(it is first or (it is not None and np.array_equal(it, first)) for it in others):
            return None
        return first

    @property
    def metadata(self) -> Metadata:
        """The items of metadata that all of the group's outcomes share."""
        first, *others = [outcome.metadata.items() for outcome in self._outcomes] or [{}.items()]
        return {name: value for name, value in first if all((name, value) in it for it in others)}

    def __repr__(self) -> str:
        tokens = sum(result.token_ids.size for result in self.results)
        ends = Counter(result.finish_reason for result in self.results)
        told = f"{short_id(self.group_id)}: {len(self.results)} results"
        told += f" ({', '.join(f'{count} {end}' for end, count in ends.items())})" if ends else ""
        failed = Counter(failure.outcome for failure in self.failures)
        versions = told_versions([version for result in self.results for version in result.versions])
        bad = [f"{count} {outcome}" for outcome, count in failed.items()]
        return shown(self, told, *bad, f"{tokens:,} tokens", versions, *self._told())

    def _told(self) -> list[str]:
        """What a kind of group has beside that."""
        return []

    @property
    def _outcomes(self) -> tuple[Outcome, ...]:
        return (*self.results, *self.failures)


def as_failure(job_id: str, state: str) -> JobFailure:
    """The failure of a job that had ended before it was submitted again, and whose outcome was taken."""
    cause = f"it had ended ({state}) before this submission, and its outcome has been taken"
    return JobFailure(job_id=job_id, outcome="dead", cause=cause)


def as_group(group_id: str, replies: Iterable[Reply]) -> Group:
    """The group, or one job as a group, of which these are the outcomes."""
    outcomes = [reply.outcome for reply in replies]
    return Group(
        group_id,
        tuple(outcome for outcome in outcomes if isinstance(outcome, RolloutResult)),
        tuple(outcome for outcome in outcomes if isinstance(outcome, JobFailure)),
    )
