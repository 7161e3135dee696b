"""Outcomes between the reply stream and whoever takes them: by arrival, by job, or by group."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...messages.broker import Reply
from ...messages.errors import InvalidField, RolloutMQError
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
    accepted: Redis has said that it has the job. If it does not know it later, it has lost it.
    job: as it was submitted, if that is known; its outcomes are told their prompt and metadata.
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
    job: _Kept | None = None
    due: float | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is kept of a job until its outcomes have been handed out; its text and media are not."""

    prompt_ids: TokenIds | None
    metadata: Metadata

    def of(self, job: GenerateJob) -> bool:
        """Whether this is what is kept of the job."""
        mine, its = self.prompt_ids, job.token_ids
        same = mine is its or (mine is not None and its is not None and np.array_equal(mine, its))
        return same and self.metadata == job.metadata


class Inbox:
    """Outcomes that have arrived and not been taken, and the jobs they belong to. Each is handed out exactly once.

    A reserved job belongs to one call: only `take_job` gives its outcomes. Other jobs are free: whoever asks first gets
    what comes of them. freed(): called when what a loop over free jobs waits for may have changed, other than by `put`.
    """

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        self._jobs: dict[str, Tracked] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._open_in: dict[str, int] = {}  # group -> its jobs that have not ended
        self._waiting: OrderedDict[tuple[str, int], Reply] = OrderedDict()
        self._full_groups: OrderedDict[str, None] = OrderedDict()
        self._past: OrderedDict[str, bool] = OrderedDict()  # delivered or abandoned jobs; whether they were delivered
        self._aside: dict[str, dict[int, Reply]] = {}  # of reserved jobs
        self._reserved = 0  # jobs that are reserved and not fully delivered
        self.samples = 0
        """Samples of all jobs that are not fully delivered."""
        self.repeats = 0
        """Outcomes that came again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def jobs(self) -> int:
        """Jobs not fully delivered yet."""
        return len(self._jobs)

    @property
    def free(self) -> int:
        """Jobs not fully delivered yet that no call has reserved."""
        return len(self._jobs) - self._reserved

    @property
    def known(self) -> list[str]:
        """Ids of the jobs that are not fully delivered yet."""
        return list(self._jobs)

    def open(self, *, newest: bool = False) -> Iterator[Tracked]:
        """The jobs that have not ended, those that were submitted first in front, or the newest ones."""
        jobs = self._jobs.values()
        return (tracked for tracked in (reversed(jobs) if newest else jobs) if not tracked.ended)

    def tracked(self, job_id: str) -> Tracked | None:
        return self._jobs.get(job_id)

    def knows(self, job_id: str) -> bool:
        """Whether a job is expected, or was delivered or abandoned not long ago."""
        return job_id in self._jobs or job_id in self._past

    def group_jobs(self, group_id: str) -> list[str]:
        """Jobs of a group, in the order they were submitted."""
        return list(self._groups.get(group_id, ()))

    @contextlib.contextmanager
    def reserved(self, job_id: str) -> Iterator[None]:
        """Reserve a job while the block lasts. Raises RolloutMQError if it is reserved already."""
        self.reserve(job_id)
        try:
            yield
        finally:
            self.release(job_id)

    def reserve(self, job_id: str) -> None:
        """Only `take_job` gives outcomes of this job from now on. Raises RolloutMQError if it does already."""
        if job_id in self._aside:
            raise RolloutMQError(f"job {job_id} belongs to another call of this client, which has not ended")
        tracked = self._jobs.get(job_id)
        here = [key for it in tracked.arrived if (key := (job_id, it)) in self._waiting] if tracked else []
        self._aside[job_id] = {key[1]: self._waiting.pop(key) for key in here}
        self._reserved += tracked is not None

    def release(self, job_id: str) -> None:
        """Whoever asks first gets what is here of a reserved job, and what comes."""
        aside = self._aside.pop(job_id, None)
        if aside is None:
            return
        for sample, reply in aside.items():
            self._waiting[(job_id, sample)] = reply
        self._reserved -= job_id in self._jobs
        self.freed()

    def abandon(self, job_id: str) -> list[Reply]:
        """Drop what is here of a job, and all that comes; returns what was here."""
        replies = self.take_job(job_id)
        self.untrack(job_id)
        self._remember(job_id, False)
        return replies

    def has_of(self, job_id: str) -> bool:
        """Whether outcomes of a reserved job are here, or nothing more is to come."""
        tracked = self._jobs.get(job_id)
        return tracked is None or tracked.ended or bool(self._aside[job_id])

    # --- in --------------------------------------------------------------------------------------------------------

    def submit(self, job: GenerateJob) -> bool:
        """Expect a job's outcomes, which will be told its prompt and metadata; False if it is expected already."""
        fresh = self.track(job.id, job.group, job.n, job.deadline_s)
        self._keep(job)
        return fresh

    def check(self, job: GenerateJob) -> None:
        """Raises InvalidField for the id of another job that is expected, or whose outcomes wait to be taken."""
        known = self._jobs.get(job.id)
        if known is None or known.guessed:
            return
        kept = known.job
        if (known.n, known.group_id) != (job.n, job.group) or (kept is not None and not kept.of(job)):
            raise InvalidField("id", job.id, "not the id of another job of this client: another job needs another id")

    def _keep(self, job: GenerateJob) -> None:
        self._jobs[job.id].job = _Kept(job.token_ids, job.metadata)

    def due(self) -> float | None:
        """When the first deadline of a job that has not ended is over, by time.monotonic(); None without any."""
        return min((job.due for job in self._jobs.values() if job.due is not None and not job.ended), default=None)

    def track(self, job_id: str, group_id: str, n: int, deadline_s: float | None = None) -> bool:
        """Expect a job's outcomes, `deadline_s` seconds from now at the latest; False if it is expected already."""
        known = self._jobs.get(job_id)
        self._past.pop(job_id, None)
        if known is not None and not known.guessed:
            return False
        if known is not None:
            self._leave_group(known)
            self.samples -= known.n
            known.group_id, known.n, known.guessed = group_id, n, False
        else:
            self._add(Tracked(job_id, group_id, n))
        self.samples += n
        self._jobs[job_id].due = None if deadline_s is None else time.monotonic() + deadline_s
        self._join_group(self._jobs[job_id])
        return known is None

    def _add(self, tracked: Tracked) -> None:
        self._jobs[tracked.job_id] = tracked
        self._reserved += tracked.job_id in self._aside

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
            self._reserved -= 1
        if not self.free or self._full_groups:
            self.freed()

    def put(self, reply: Reply) -> bool:
        """Take an outcome in; False if it had arrived before, or nobody wants it.

        The outcome of an unknown job belongs to an earlier client of this id; the job is tracked from now on.
        """
        outcome, (_, sample) = reply.outcome, place_of(reply)
        tracked = self._jobs.get(outcome.job_id)
        if tracked is None and outcome.job_id in self._past:
            self.repeats += self._past[outcome.job_id]
            return False
        if tracked is None or tracked.guessed:
            if not isinstance(outcome, JobFailure):
                self.track(outcome.job_id, outcome.group_id, outcome.n)
            elif tracked is None:
                self._guess(outcome.job_id, outcome.group_id)
            tracked = self._jobs[outcome.job_id]
        fresh = sample not in tracked.arrived
        self.repeats += not fresh
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
                self._jobs[job_id].due = None if job.deadline_s is None else time.monotonic() + job.deadline_s

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
            self._remember(job_id, True)

    def _remember(self, job_id: str, delivered: bool) -> None:
        self._past[job_id] = delivered
        if len(self._past) > MEMORY:
            self._past.popitem(last=False)

    # --- back again ------------------------------------------------------------------------------------------------

    def put_back(self, replies: Sequence[Reply]) -> None:
        """Have these wait again, before all others: who took them could not be given them."""
        for reply in reversed(replies):
            job_id, sample = place_of(reply)
            tracked = self._jobs.get(job_id)
            if tracked is None:
                tracked = self._all_taken(reply)
            else:
                tracked.taken -= sample in tracked.arrived
            tracked.arrived.add(sample)
            if (aside := self._aside.get(job_id)) is not None:
                aside[sample] = reply
            else:
                self._waiting[(job_id, sample)] = reply
                self._waiting.move_to_end((job_id, sample), last=False)
        self.freed()

    def _all_taken(self, reply: Reply) -> Tracked:
        """The job of an outcome, which had ended and been delivered."""
        outcome = reply.outcome
        self._past.pop(outcome.job_id, None)
        failed = isinstance(outcome, JobFailure)
        n = 1 if isinstance(outcome, JobFailure) else outcome.n
        tracked = Tracked(outcome.job_id, outcome.group_id or outcome.job_id, n, ended=True, guessed=failed)
        tracked.state = outcome.outcome if isinstance(outcome, JobFailure) else "done"
        self._add(tracked)
        self.samples += n
        self._join_group(tracked)
        return tracked


def place_of(reply: Reply) -> tuple[str, int]:
    """Its job and sample, or FAILURE: replies with the same ones are the same outcome."""
    outcome = reply.outcome
    return outcome.job_id, FAILURE if isinstance(outcome, JobFailure) else outcome.sample
