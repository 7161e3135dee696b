"""Counts what was submitted, what came back, how often, and under which weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ...messages.model import RolloutResult
from ...producer.client import Group
from .task import token_versions


@dataclass(slots=True)
class Tally:
    """Counts over a whole run.

    jobs, samples: submitted. tokens: received. failures: one line per job that failed.
    staleness: tokens by how many versions the trainer was ahead of the weights that sampled them, when it used them.
    redone: samples that arrived from a second attempt of their job.
    """

    jobs: int = 0
    samples: int = 0
    tokens: int = 0
    duplicates: int = 0
    mixed_version_samples: int = 0
    bad_segments: int = 0
    redone: int = 0
    failures: list[str] = field(default_factory=list)
    staleness: Counter[int] = field(default_factory=Counter)
    by_worker: Counter[str] = field(default_factory=Counter)
    _expected: dict[str, int] = field(default_factory=dict)
    _received: set[tuple[str, int]] = field(default_factory=set)

    def submitted(self, job_id: str, n: int) -> None:
        """A job of `n` samples was accepted by the pool."""
        self.jobs += 1
        self.samples += n
        self._expected[job_id] = n

    def received(self, group: Group) -> None:
        """Count the results and failures of a group."""
        self.failures += [str(failure) for failure in group.failures]
        for result in group.results:
            key = (result.job_id, result.sample)
            if key in self._received:
                self.duplicates += 1
                continue
            self._received.add(key)
            self.tokens += len(result.token_ids)
            self.by_worker[result.worker_id] += 1
            self.redone += result.attempt > 1
            self.mixed_version_samples += len(set(result.versions)) > 1
            self.bad_segments += sum(segment.tokens for segment in result.segments) != len(result.token_ids)

    def used(self, results: Sequence[RolloutResult], version: int) -> Counter[int]:
        """Count results from which the trainer learns at `version`. Returns their tokens by staleness."""
        stale: Counter[int] = Counter()
        for result in results:
            stale.update((version - token_versions(result)).tolist())
        self.staleness += stale
        return stale

    @property
    def lost(self) -> int:
        """Samples that were submitted and have not come back."""
        missing = {(job, sample) for job, n in self._expected.items() for sample in range(n)} - self._received
        return len(missing)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of the tokens that were used, in versions."""
        return float(np.average(list(self.staleness), weights=list(self.staleness.values()))) if self.staleness else 0.0

    @property
    def staleness_max(self) -> int:
        """Staleness of the stalest token that was used, in versions."""
        return max(self.staleness, default=0)
