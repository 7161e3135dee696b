"""Outcomes between the reply stream and whoever takes them: by arrival, by job, or by group."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ...messages.broker import Reply
from ...messages.errors import InvalidField, RolloutMQError
from ...messages.model import GenerateJob, JobFailure, TaskResult
from .tracked import FAILURE, Tracked, place_of

MEMORY = 1 << 17
"""How many delivered jobs are remembered: after a failover their outcomes may come again."""


class Inbox:
    """Outcomes that have arrived and not been taken, and the jobs they belong to. Each is handed out exactly once.

    A reserved job belongs to one call: only `take_job` gives its outcomes. Other jobs are free: whoever asks first gets
    what comes of them. A task (an embedding, a score, a reward) is worth nothing without the call that waits for it: it
    is reserved from the beginning, and what comes of an earlier client's is dropped.
    freed(): called when what a loop over free jobs waits for may have changed, other than by `put`. moved(jobs): called
    when something is here of them, or nothing more is to come.
    """

    def __init__(self) -> None:
        self.freed: Callable[[], None] = lambda: None
        self.moved: Callable[[Iterable[str]], None] = lambda _: None
        self._jobs: dict[str, Tracked] = {}
        self._groups: dict[str, dict[str, None]] = {}
        self._open_in: dict[str, int] = {}  # group -> its jobs that have not ended
        self._waiting: OrderedDict[tuple[str, int], Reply] = OrderedDict()
        self._full_groups: OrderedDict[str, None] = OrderedDict()
        self._past: OrderedDict[str, bool] = OrderedDict()  # delivered or abandoned jobs; whether they were delivered
        self._aside: dict[str, dict[int, Reply]] = {}  # of reserved jobs
        self.stirred: set[str] = set()
        """Reserved jobs of which outcomes are here, or nothing more is to come."""
        self._reserved = 0  # jobs that are reserved and not fully delivered
        self._tasks = 0  # jobs that are tasks and not fully delivered
        self.samples = 0
        """Samples of all jobs that are not fully delivered; those of tasks do not count."""
        self.repeats = 0
        """Outcomes that came again."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def jobs(self) -> int:
        """Jobs not fully delivered yet."""
        return len(self._jobs)

    @property
    def outstanding(self) -> int:
        """Jobs not fully delivered yet that are no tasks."""
        return len(self._jobs) - self._tasks

    @property
    def free(self) -> int:
        """Jobs not fully delivered yet that no call has reserved."""
        return len(self._jobs) - self._reserved

    @property
    def groups(self) -> int:
        """Groups of which not all is delivered."""
        return len(self._groups)

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

    def is_over(self, job_id: str) -> bool:
        """Whether nothing more of a job is to come."""
        return (tracked := self._jobs.get(job_id)) is None or tracked.ended

    def is_whole(self, job_id: str, n: int) -> bool:
        """Whether all `n` samples of a job have arrived."""
        tracked = self._jobs.get(job_id)
        return tracked is not None and len(tracked.arrived - {FAILURE}) == n

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
        self._stir(job_id)

    def release(self, job_id: str) -> None:
        """Whoever asks first gets what is here of a reserved job, and what comes."""
        aside = self._aside.pop(job_id, None)
        if aside is None:
            return
        for sample, reply in aside.items():
            self._waiting[(job_id, sample)] = reply
        self._reserved -= job_id in self._jobs
        self.stirred.discard(job_id)
        self.freed()

    def abandon(self, job_id: str) -> list[Reply]:
        """Drop what is here of a job, and all that comes; returns what was here."""
        replies = self.take_job(job_id)
        self.untrack(job_id)
        self._remember(job_id, False)
        return replies

    def _stir(self, job_id: str) -> None:
        self.moved((job_id,))
        if (aside := self._aside.get(job_id)) is None:
            return
        if aside or self.is_over(job_id):
            self.stirred.add(job_id)
        else:
            self.stirred.discard(job_id)

    # --- in --------------------------------------------------------------------------------------------------------

    def submit(self, job: GenerateJob) -> bool:
        """Expect a job's outcomes, which will be told its prompt and metadata; False if it is expected already."""
        fresh = self.track(job.id, job.group, job.n, job.deadline_s)
        self._keep(job)
        return fresh

    def check(self, job: GenerateJob) -> None:
        """Raises InvalidField for the id of another job that is expected, or whose outcomes wait to be taken."""
        known = self._jobs.get(job.id)
        if known is not None and not known.guessed and not known.may_be(job):
            raise InvalidField("id", job.id, "not the id of another job of this client: another job needs another id")

    def expect(self, task_id: str, n: int, deadline_s: float | None = None) -> None:
        """Expect the outcomes of a task, `deadline_s` seconds from now at the latest, and reserve them."""
        self.track(task_id, task_id, n, deadline_s)
        self._jobs[task_id].task = True
        self._tasks += 1
        self.samples -= n
        self.reserve(task_id)

    def accepted(self, job_ids: Iterable[str]) -> None:
        """Redis has these jobs."""
        for job_id in job_ids:
            if (tracked := self._jobs.get(job_id)) is not None:
                tracked.accepted = True

    def _keep(self, job: GenerateJob) -> None:
        tracked = self._jobs[job.id]
        tracked.prompt_ids, tracked.metadata = job.token_ids, job.metadata

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
        self._stir(tracked.job_id)

    def untrack(self, job_id: str) -> None:
        """Expect nothing (more) of a job."""
        tracked = self._jobs.pop(job_id, None)
        if tracked is None:
            return
        self._tasks -= tracked.task
        self.samples -= 0 if tracked.task else tracked.n
        self._leave_group(tracked)
        for key in [(job_id, sample) for sample in tracked.arrived]:
            self._waiting.pop(key, None)
        if job_id in self._aside:
            self._aside[job_id].clear()
            self._reserved -= 1
        self._stir(job_id)
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
        if isinstance(outcome, TaskResult) and not (tracked is not None and tracked.task):
            self.untrack(outcome.job_id)
            if reply.last:
                self._remember(outcome.job_id, False)
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
        self._stir(outcome.job_id)
        return fresh

    def recover(self, open_jobs: Mapping[str, str], known: Mapping[str, GenerateJob]) -> None:
        """Expect the jobs of an earlier client of this id that are still open (with their groups); others have ended.

        known: of those, the ones that could be read.
        """
        for job_id in [job_id for job_id in self._jobs if job_id not in open_jobs]:
            self.end(job_id)
        # A task that has ended since `open_jobs` was asked for is past.
        for job_id in sorted(open_jobs.keys() - self._jobs.keys() - self._past.keys()):
            self._guess(job_id, open_jobs[job_id])
        self.accepted(open_jobs)
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
            self._stir(job_id)

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
        self._stir(job_id)
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
        if (metadata := (tracked := self._jobs[job_id]).metadata) is not None:
            for reply in replies:
                if not isinstance(reply.outcome, TaskResult):
                    reply.outcome.learn(tracked.prompt_ids, metadata)
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
                self._stir(job_id)
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
