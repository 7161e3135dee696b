"""Which inbox an outcome goes to: what was submitted as a task is for its caller and nobody else."""

from __future__ import annotations

from collections import OrderedDict

from ...messages.broker import Reply
from ...messages.model import TaskResult
from .inbox import MEMORY, Inbox


class Inboxes:
    """samples: of generation jobs, for `results`, `groups` and `wait`. tasks: of embeddings, scores and rewards.

    A task is worth nothing without the call that waits for it: results of one that an earlier client of the same id
    submitted are dropped.
    """

    def __init__(self, samples: Inbox) -> None:
        self._samples, self.tasks = samples, Inbox()
        self._expected: OrderedDict[str, None] = OrderedDict()  # tasks of this client, the last ones, over or not
        self._over: set[str] = set()  # tasks of an earlier client that have ended

    @property
    def jobs(self) -> int:
        """Jobs not fully delivered yet."""
        return self._samples.jobs + self.tasks.jobs

    def expect(self, job_id: str, group_id: str, n: int) -> None:
        """Expect the outcomes of a task."""
        self.tasks.track(job_id, group_id, n)
        self._expected[job_id] = None
        if len(self._expected) > MEMORY:
            self._expected.popitem(last=False)

    def put(self, reply: Reply) -> bool:
        """Take an outcome in; False if nobody waits for it (any more)."""
        job_id = reply.outcome.job_id
        if self.tasks.tracked(job_id) is not None:
            return self.tasks.put(reply)
        if job_id in self._expected:  # given up, or delivered before a failover that brings it again
            return False
        if isinstance(reply.outcome, TaskResult):
            self._samples.untrack(job_id)
            if reply.last:
                self._over.add(job_id)
            return False
        return self._samples.put(reply)

    def abandon(self, job_id: str) -> list[Reply]:
        """Nobody waits for this task any more: what comes is dropped. What there is of it."""
        replies = self.tasks.take_job(job_id)
        self.tasks.untrack(job_id)
        return replies

    def recover(self, open_jobs: dict[str, str]) -> None:
        """As Inbox has it; a task that has ended since `open_jobs` was asked for is not expected."""
        self._samples.recover({job_id: group for job_id, group in open_jobs.items() if job_id not in self._over})
        self._over.clear()
