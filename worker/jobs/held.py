"""The jobs that a worker holds: what is left to do for each, and the results of what is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ...messages.broker import Claim, Lease, Release
from ...messages.codec import Job, Result
from ..engine import EngineInfo, Generated
from ..text import Tokenizer
from .sample import SampleRun
from .task import Run, TaskRun
from .traces import JobTraces


@dataclass(slots=True)
class HeldJob:
    """A claimed job. `samples` are those not published yet; `deadline` is on this process' monotonic clock.

    in_vain: how often it was interrupted to be moved, and stayed.
    """

    claim: Claim
    job: Job
    samples: dict[int, Run] = field(default_factory=dict)
    deadline: float | None = None
    in_vain: int = 0

    @property
    def id(self) -> str:
        return self.job.id

    def release(self, lost: bool = False, progress: Callable[[str, int], Generated | None] | None = None) -> Release:
        """How to give the job back: with what its unfinished samples have generated so far.

        progress(request id, start): what the engine has of a sample that still runs; None leaves that out.
        """
        unfinished = [sample for sample in self.samples.values() if sample.finish_reason is None]
        pieces = tuple(piece for sample in unfinished if (piece := sample.unsaved(progress)) is not None)
        return Release(self.id, self.claim.attempt, pieces, lost)

    def is_all_in(self, release: Release) -> bool:
        """Whether it has every token: some may not be shown yet, or be too much for a message."""
        unsaved = sum(sample.unsaved_tokens for sample in self.samples.values() if isinstance(sample, SampleRun))
        return unsaved == sum(len(piece.partial.token_ids) for piece in release.pieces)


class HeldJobs:
    """All jobs of this worker, by id. on_drop(): called when one was dropped; there may be room now."""

    def __init__(self, on_drop: Callable[[], None] = lambda: None) -> None:
        self._on_drop = on_drop
        self._jobs: dict[str, HeldJob] = {}
        self.traces = JobTraces()
        self.unpublished = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        return iter(list(self._jobs.values()))

    def unpublished_of(self, lease: Lease) -> int:
        """Of the samples that are `unpublished`, those under the lease in one shard."""
        return sum(len(held.samples) for held in self if lease.has(held.id))

    def get(self, job_id: str, attempt: int | None = None) -> HeldJob | None:
        """The job, if it is held (in this very attempt, if one is given)."""
        held = self._jobs.get(job_id)
        if held is None or (attempt is not None and held.claim.attempt != attempt):
            return None
        return held

    def add(self, held: HeldJob) -> None:
        self.drop(held.id)  # a failover of Redis can lose the first claim, and then the job comes again
        self._jobs[held.id] = held
        self.unpublished += len(held.samples)
        if self.traces.taken(held.job, held.claim.attempt, held.claim.queued_s):
            for sample in held.samples.values():
                sample.traces = self.traces

    def published(self, job_id: str, attempt: int, sample: int) -> None:
        """One sample has been published. A job with none left is forgotten."""
        held = self.get(job_id, attempt)
        if held is None or held.samples.pop(sample, None) is None:
            return
        self.unpublished -= 1
        self.traces.published(job_id, sample)
        if not held.samples:
            del self._jobs[job_id]
            self.traces.left(job_id)

    def drop(self, job_id: str, attempt: int | None = None) -> None:
        """Forget a job, if it is held (in this very attempt, if one is given). Tokens that its samples still generate
        are thrown away."""
        if (held := self.get(job_id, attempt)) is not None:
            del self._jobs[job_id]
            self.traces.left(job_id)
            self.unpublished -= len(held.samples)
            for sample in held.samples.values():
                sample.dropped = True
            self._on_drop()


def as_result(run: Run, worker_id: str, info: EngineInfo, tokenizer: Tokenizer) -> Result:
    """The result of a finished run, with its text if the job came as text, and still without tool calls."""
    if isinstance(run, TaskRun):
        return run.result(worker_id, info)
    text = None if run.job.token_ids is not None else run.text(tokenizer.decode)
    return run.result(worker_id, info, text)


def text_with_calls(run: SampleRun, tokenizer: Tokenizer) -> str | None:
    """The text in which to look for tool calls; None if the job has no tools."""
    return tokenizer.decode(run.tokens, special=True) if run.job.tools else None
