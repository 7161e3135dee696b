"""Outcomes between the reply stream and whoever takes them: by arrival, by job, or by group."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...messages.broker import Reply
from ...messages.errors import RolloutMQError
from ...messages.model import GenerateJob, JobFailure, Metadata, TaskResult, TokenIds

FAILURE = -1
"""Stands for a job's failure where others have the number of a sample."""
MEMORY = 1 << 17
"""How many delivered jobs are remembered: after a failover their outcomes may come again."""


@dataclass(slots=True)
class Tracked:
    """A job that is not fully delivered. `arrived`: the samples (or FAILURE) seen; `taken` of them were handed out.

    ended: its last outcome has arrived; an earlier client of the same id may have taken others.
    state: "r" until then, afterwards how it ended. guessed: its n is not known, and perhaps not its group.
    job: as it was submitted, if that is known; its outcomes are told their prompt and metadata.
    """

    job_id: str
    group_id: str
    n: int
    arrived: set[int] = field(default_factory=set)
    taken: int = 0
    ended: bool = False
    state: str = "r"
    guessed: bool = False
    job: _Kept | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a job until its outcomes have been handed out; its text and media are not."""

    prompt_ids: TokenIds | None
    metadata: Metadata


class Inbox:
    """Outcomes that have arrived and not been taken, and the jobs they belong to. Each is handed out exactly once."""

    def __init__(self) -> None:
        self._jobs: dict[str, Tracked] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._open_in: dict[str, int] = {}  # group -> its jobs that have not ended
        self._waiting: OrderedDict[tuple[str, int], Reply] = OrderedDict()
        self._full_groups: OrderedDict[str, None] = OrderedDict()
        self._past: OrderedDict[str, None] = OrderedDict()
        self._aside: dict[str, dict[int, Reply]] = {}  # of jobs that are being streamed
        self.samples = 0
        """Samples of all jobs that are not fully delivered."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def jobs(self) -> int:
        """Jobs not fully delivered yet."""
        return len(self._jobs)

    def tracked(self, job_id: str) -> Tracked | None:
        return self._jobs.get(job_id)

    def group_jobs(self, group_id: str) -> list[str]:
        """Jobs of a group, in the order they were submitted."""
        return list(self._groups.get(group_id, ()))

    @contextlib.contextmanager
    def reserved(self, job_id: str) -> Iterator[None]:
        """In the block, only `take_job` gives outcomes of this job. Raises RolloutMQError if it does already."""
        if job_id in self._aside:
            raise RolloutMQError(f"job {job_id} is being streamed already")
        waiting = [key for key in self._waiting if key[0] == job_id] if job_id in self._jobs else []
        self._aside[job_id] = {key[1]: self._waiting.pop(key) for key in waiting}
        try:
            yield
        finally:
            for sample, reply in self._aside.pop(job_id).items():
                self._waiting[(job_id, sample)] = reply

    def has_of(self, job_id: str) -> bool:
        """Whether outcomes of a reserved job are here, or nothing more is to come."""
        tracked = self._jobs.get(job_id)
        return tracked is None or tracked.ended or bool(self._aside[job_id])

    # --- in --------------------------------------------------------------------------------------------------------

    def submit(self, job: GenerateJob) -> bool:
        """Expect a job's outcomes, which will be told its prompt and metadata; False if it is expected already."""
        fresh = self.track(job.id, job.group, job.n)
        self._keep(job)
        return fresh

    def _keep(self, job: GenerateJob) -> None:
        self._jobs[job.id].job = _Kept(job.token_ids, job.metadata)

    def track(self, job_id: str, group_id: str, n: int) -> bool:
        """Expect a job's outcomes; False if it is expected already."""
        known = self._jobs.get(job_id)
        self._past.pop(job_id, None)
        if known is not None and not known.guessed:
            return False
        if known is not None:
            self._leave_group(known)
            self.samples -= known.n
            known.group_id, known.n, known.guessed = group_id, n, False
        else:
            self._jobs[job_id] = Tracked(job_id, group_id, n)
        self.samples += n
        self._join_group(self._jobs[job_id])
        return known is None

    def untrack(self, job_id: str) -> None:
        """Expect nothing (more) of a job."""
        tracked = self._jobs.pop(job_id, None)
        if tracked is None:
            return
        self.samples -= tracked.n
        self._leave_group(tracked)
        for key in [(job_id, sample) for sample in tracked.arrived]:
            self._waiting.pop(key, None)
        if job_id in self._aside:
            self._aside[job_id].clear()

    def put(self, reply: Reply) -> bool:
        """Take an outcome in; False if it had arrived before.

        The outcome of an unknown job belongs to an earlier client of this id; the job is tracked from now on.
        """
        outcome = reply.outcome
        sample = FAILURE if isinstance(outcome, JobFailure) else outcome.sample
        tracked = self._jobs.get(outcome.job_id)
        if tracked is None and outcome.job_id in self._past:
            return False
        if tracked is None or tracked.guessed:
            if not isinstance(outcome, JobFailure):
                self.track(outcome.job_id, outcome.group_id, outcome.n)
            elif tracked is None:
                self._guess(outcome.job_id, outcome.group_id)
            tracked = self._jobs[outcome.job_id]
        fresh = sample not in tracked.arrived
        if fresh:
            tracked.arrived.add(sample)
            if (aside := self._aside.get(outcome.job_id)) is not None:
                aside[sample] = reply
            else:
                self._waiting[(outcome.job_id, sample)] = reply
        if reply.last and not tracked.ended:  # after a failover a sample that comes again may be the last
            self._ended(tracked, outcome.outcome if isinstance(outcome, JobFailure) else "done")
            if not fresh:
                self._delivered(outcome.job_id, 0)
        return fresh

    def recover(self, open_jobs: Mapping[str, str], known: Mapping[str, GenerateJob]) -> None:
        """Expect the jobs of an earlier client of this id that are still open (with their groups); others have ended.

        known: of those, the ones that could be read.
        """
        for job_id in [job_id for job_id in self._jobs if job_id not in open_jobs]:
            self.end(job_id)
        for job_id in sorted(open_jobs.keys() - self._jobs.keys()):
            self._guess(job_id, open_jobs[job_id])
        for job_id, job in known.items():
            if job_id in self._jobs:
                self._keep(job)

    def _guess(self, job_id: str, group_id: str) -> None:
        self.track(job_id, group_id or job_id, 1)
        self._jobs[job_id].guessed = True

    def end(self, job_id: str, state: str = "done") -> None:
        """Nothing more will arrive of a job: an earlier client took what else there was of it."""
        tracked = self._jobs.get(job_id)
        if tracked is not None and tracked.arrived and not tracked.ended:
            self._ended(tracked, state)
            self._delivered(job_id, 0)

    def _ended(self, tracked: Tracked, state: str) -> None:
        tracked.ended, tracked.state = True, state
        self._open_in[tracked.group_id] -= 1
        if not self._open_in[tracked.group_id]:
            self._full_groups.setdefault(tracked.group_id)

    def _join_group(self, tracked: Tracked) -> None:
        self._groups.setdefault(tracked.group_id, {})[tracked.job_id] = None
        still_open = self._open_in.get(tracked.group_id, 0) + (not tracked.ended)
        self._open_in[tracked.group_id] = still_open
        if still_open:
            self._full_groups.pop(tracked.group_id, None)
        else:
            self._full_groups.setdefault(tracked.group_id)

    def _leave_group(self, tracked: Tracked) -> None:
        group = self._groups[tracked.group_id]
        del group[tracked.job_id]
        self._open_in[tracked.group_id] -= not tracked.ended
        if not group:
            del self._groups[tracked.group_id], self._open_in[tracked.group_id]
            self._full_groups.pop(tracked.group_id, None)
        elif not self._open_in[tracked.group_id]:
            self._full_groups.setdefault(tracked.group_id)

    # --- out -------------------------------------------------------------------------------------------------------

    def take_next(self) -> Reply | None:
        """The outcome that arrived first."""
        if not self._waiting:
            return None
        key, reply = self._waiting.popitem(last=False)
        self._hand_out(key[0], [reply])
        return reply

    def take_job(self, job_id: str, most: int | None = None) -> list[Reply]:
        """What is here of one job, at most `most` outcomes: results by sample number, then the failure."""
        tracked = self._jobs.get(job_id)
        if tracked is None:
            return []
        order = sorted(tracked.arrived, key=lambda sample: (sample == FAILURE, sample))
        aside = self._aside.get(job_id, {})
        here = [sample for sample in order if (job_id, sample) in self._waiting or sample in aside][:most]
        found = [aside.pop(it) if it in aside else self._waiting.pop((job_id, it)) for it in here]
        self._hand_out(job_id, found)
        return found

    def full_group(self) -> str | None:
        """The group that has been complete for longest and was not taken. A reserved job holds up its own group."""
        if not self._aside:
            return next(iter(self._full_groups), None)
        return next((it for it in self._full_groups if self._aside.keys().isdisjoint(self._groups[it])), None)

    def take_group(self, group_id: str) -> list[Reply]:
        """What is here of a group, job by job in the order of submission."""
        return [reply for job_id in self.group_jobs(group_id) for reply in self.take_job(job_id)]

    def _hand_out(self, job_id: str, replies: list[Reply]) -> None:
        if (job := self._jobs[job_id].job) is not None:
            for reply in replies:
                if not isinstance(reply.outcome, TaskResult):
                    reply.outcome.learn(job.prompt_ids, job.metadata)
        self._delivered(job_id, len(replies))

    def _delivered(self, job_id: str, count: int) -> None:
        tracked = self._jobs[job_id]
        tracked.taken += count
        if tracked.ended and tracked.taken >= len(tracked.arrived):
            self.untrack(job_id)
            self._past[job_id] = None
            if len(self._past) > MEMORY:
                self._past.popitem(last=False)


class Inboxes:
    """Decides which inbox an outcome goes to: what was submitted as a task is for its caller and nobody else.

    samples: of generation jobs, for `results`, `groups` and `wait`. tasks: of embeddings, scores and rewards.
    A task is worth nothing without the call that waits for it: results of tasks that an earlier client of the same id
    submitted are dropped.
    """

    def __init__(self, samples: Inbox) -> None:
        self._samples, self.tasks = samples, Inbox()
        # This client's tasks, over or not, the newest MEMORY of them.
        self._expected: OrderedDict[str, None] = OrderedDict()
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
        if job_id in self._expected:  # it was given up, or comes again after a failover
            return False
        if isinstance(reply.outcome, TaskResult):
            self._samples.untrack(job_id)
            if reply.last:
                self._over.add(job_id)
            return False
        return self._samples.put(reply)

    def abandon(self, job_id: str) -> list[Reply]:
        """Drop what else comes of this task, for which nobody waits; returns what is here of it."""
        replies = self.tasks.take_job(job_id)
        self.tasks.untrack(job_id)
        return replies

    def recover(self, open_jobs: Mapping[str, str], known: Mapping[str, GenerateJob]) -> None:
        """As Inbox has it; a task that has ended since `open_jobs` was asked for is not expected."""
        left = {job_id: group for job_id, group in open_jobs.items() if job_id not in self._over}
        self._samples.recover(left, known)
        self._over.clear()


def as_failure(job_id: str, state: str) -> JobFailure:
    """The failure of a job that had ended before it was submitted again, and whose outcome was taken."""
    cause = f"it had ended ({state}) before this submission, and its outcome has been taken"
    return JobFailure(job_id=job_id, outcome="dead", cause=cause)
