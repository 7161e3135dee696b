"""Which outcomes reach whom: tasks their callers only, samples whoever asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from ...messages.broker import Reply
from ...messages.model import GenerateJob, TaskResult
from .inbox import Inbox, Tracked


class Inboxes:
    """Decides which inbox an outcome goes to: what was submitted as a task is for its caller and nobody else.

    samples: of generation jobs, for `results`, `groups` and `wait`. tasks: of embeddings, scores and rewards.
    A task is worth nothing without the call that waits for it: results of tasks that an earlier client of the same id
    submitted are dropped.
    """

    def __init__(self, samples: Inbox) -> None:
        self._samples, self.tasks = samples, Inbox()
        self._over: set[str] = set()  # tasks of an earlier client that have ended

    @property
    def jobs(self) -> int:
        """Jobs not fully delivered yet."""
        return self._samples.jobs + self.tasks.jobs

    @property
    def repeats(self) -> int:
        """Outcomes that came again."""
        return self._samples.repeats + self.tasks.repeats

    def open(self, *, newest: bool = False) -> Iterator[Tracked]:
        """The jobs that have not ended, those that were submitted first in front, or the newest ones."""
        parts = (self._samples, self.tasks)
        return chain.from_iterable(part.open(newest=newest) for part in (reversed(parts) if newest else parts))

    def tracked(self, job_id: str) -> Tracked | None:
        return self._samples.tracked(job_id) or self.tasks.tracked(job_id)

    def accepted(self, job_ids: Iterable[str]) -> None:
        """Redis has these jobs."""
        for job_id in job_ids:
            if (tracked := self.tracked(job_id)) is not None:
                tracked.accepted = True

    def due(self) -> float | None:
        """When the first deadline of a job that has not ended is over, by time.monotonic(); None without any."""
        return min((due for it in (self._samples, self.tasks) if (due := it.due()) is not None), default=None)

    def expect(self, job_id: str, group_id: str, n: int, deadline_s: float | None = None) -> None:
        """Expect the outcomes of a task, `deadline_s` seconds from now at the latest."""
        self.tasks.track(job_id, group_id, n, deadline_s)

    def put(self, reply: Reply) -> bool:
        """Take an outcome in; False if nobody waits for it (any more)."""
        job_id = reply.outcome.job_id
        if self.tasks.knows(job_id):
            return self.tasks.put(reply)
        if isinstance(reply.outcome, TaskResult):
            self._samples.untrack(job_id)
            if reply.last:
                self._over.add(job_id)
            return False
        return self._samples.put(reply)

    def abandon(self, job_id: str) -> list[Reply]:
        """Drop what is here of this task, for which nobody waits, and all that comes; returns what was here."""
        return self.tasks.abandon(job_id)

    def recover(self, open_jobs: Mapping[str, str], known: Mapping[str, GenerateJob]) -> None:
        """As Inbox has it; a task that has ended since `open_jobs` was asked for is not expected."""
        left = {job_id: group for job_id, group in open_jobs.items() if job_id not in self._over}
        self._samples.recover(left, known)
        self.accepted(left)
        self._over.clear()
