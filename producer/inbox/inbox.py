"""Where outcomes wait between the reply stream and whoever takes them: by arrival, by job, or by group."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...messages.broker import Reply
from ...messages.errors import RolloutMQError
from ...messages.model import JobFailure

FAILURE = -1
"""The place of a job's failure among its samples' numbers."""
MEMORY = 1 << 17
"""So many delivered jobs are remembered: after a failover their outcomes may come again."""


@dataclass(slots=True)
class Tracked:
    """A job that is not fully delivered. `arrived`: the samples (or FAILURE) seen; `taken` of them were handed out.

    ended: its last outcome has arrived; earlier ones may have been taken by an earlier client of the same id.
    state: "r" until then, afterwards how it ended. guessed: its n is not known, and its group perhaps.
    """

    job_id: str
    group_id: str
    n: int
    arrived: set[int] = field(default_factory=set)
    taken: int = 0
    ended: bool = False
    state: str = "r"
    guessed: bool = False


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
        """Inside, only `take_job` gives outcomes of this job. Raises RolloutMQError if it is reserved already."""
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
        """Take an outcome in; False if it had arrived before. One of an unknown job (the client before this one
        submitted it) starts to be tracked here."""
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
        if reply.last and not tracked.ended:  # a sample that came again may be the last: after a failover
            self._ended(tracked, outcome.outcome if isinstance(outcome, JobFailure) else "done")
            if not fresh:
                self._delivered(outcome.job_id, 0)
        return fresh

    def recover(self, open_jobs: dict[str, str]) -> None:
        """What an earlier client of this id left: its jobs that are still open (with their groups) are expected, the
        others have ended."""
        for job_id in [job_id for job_id in self._jobs if job_id not in open_jobs]:
            self.end(job_id)
        for job_id in sorted(open_jobs.keys() - self._jobs.keys()):
            self._guess(job_id, open_jobs[job_id])

    def _guess(self, job_id: str, group_id: str) -> None:
        self.track(job_id, group_id or job_id, 1)
        self._jobs[job_id].guessed = True

    def end(self, job_id: str, state: str = "done") -> None:
        """Nothing more will arrive of a job: what there was beside it was taken by an earlier client."""
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
        self._delivered(key[0], 1)
        return reply

    def take_job(self, job_id: str, most: int | None = None) -> list[Reply]:
        """What is here of one job, by sample number; its failure last. The first `most` of it, if that is given."""
        tracked = self._jobs.get(job_id)
        if tracked is None:
            return []
        order = sorted(tracked.arrived, key=lambda sample: (sample == FAILURE, sample))
        aside = self._aside.get(job_id, {})
        here = [sample for sample in order if (job_id, sample) in self._waiting or sample in aside][:most]
        found = [aside.pop(it) if it in aside else self._waiting.pop((job_id, it)) for it in here]
        self._delivered(job_id, len(found))
        return found

    def full_group(self) -> str | None:
        """The group that has been complete for longest and not taken. A job that is reserved holds up its own."""
        if not self._aside:
            return next(iter(self._full_groups), None)
        return next((it for it in self._full_groups if self._aside.keys().isdisjoint(self._groups[it])), None)

    def take_group(self, group_id: str) -> list[Reply]:
        """What is here of a group, job by job in the order of submission."""
        return [reply for job_id in self.group_jobs(group_id) for reply in self.take_job(job_id)]

    def _delivered(self, job_id: str, count: int) -> None:
        tracked = self._jobs[job_id]
        tracked.taken += count
        if tracked.ended and tracked.taken >= len(tracked.arrived):
            self.untrack(job_id)
            self._past[job_id] = None
            if len(self._past) > MEMORY:
                self._past.popitem(last=False)


def as_failure(job_id: str, state: str) -> JobFailure:
    """What to say about a job that had ended before it was submitted again, and whose outcome has been taken."""
    cause = f"it had ended ({state}) before this submission, and its outcome has been taken"
    return JobFailure(job_id=job_id, outcome="dead", cause=cause)
