"""What engines generated and what came out, counted outside the broker: what is lost, twice, wrong or wasted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rolloutmq.messages.model import JobFailure, RolloutResult, TaskResult


def script(start: int, end: int) -> npt.NDArray[np.int32]:
    """Tokens `start` to `end` of any sample: each is its own place, so a gap and a repeat both show."""
    return np.arange(start, end, dtype=np.int32)


@dataclass(slots=True)
class Oracle:
    """The books of one run.

    generated: tokens of all engines, as blocks; each engine counts its own. delivered: tokens of results, each sample
    once. twice, wrong: results that had come before, and those with other tokens than the sample has. failed: jobs
    that ended as a failure.
    """

    generated: int = 0
    delivered: int = 0
    samples: int = 0
    twice: int = 0
    wrong: int = 0
    failed: int = 0
    lengths: dict[str, Sequence[int]] = field(default_factory=dict)
    open: dict[str, set[int]] = field(default_factory=dict)

    def submitted(self, job_id: str, lengths: Sequence[int]) -> None:
        """A job with samples of these lengths was accepted."""
        self.lengths[job_id] = lengths
        self.open[job_id] = set(range(len(lengths)))

    def arrived(self, outcome: RolloutResult | TaskResult | JobFailure) -> None:
        """The client read an outcome."""
        job_id = outcome.job_id
        missing = self.open.get(job_id, set())
        if not isinstance(outcome, RolloutResult):
            self.failed += 1
            self.open.pop(job_id, None)
            return
        if outcome.sample not in missing:
            self.twice += 1
            return
        missing.discard(outcome.sample)
        if not missing:
            del self.open[job_id]
        self.samples += 1
        self.delivered += len(outcome.token_ids)
        self.wrong += not np.array_equal(outcome.token_ids, script(0, self.lengths[job_id][outcome.sample]))

    @property
    def wasted(self) -> int:
        """Tokens, as blocks, that were generated and are in no result."""
        return self.generated - self.delivered
