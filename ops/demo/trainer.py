"""The asynchronous loop: take groups that are complete, learn, publish, while the pool generates the next ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ...messages.model import GenerateJob, RolloutResult, SamplingParams
from ...producer.blocking import BlockingRolloutClient
from ...producer.client import Group
from ...sync.publish import PublishHandle, WeightPublisher
from .learner import Learner
from .tally import Tally
from .task import ANSWER_TOKENS, EOS, Problem, draw, make_batch

GROUPS = 20
SAMPLES = 16
AHEAD = 2
MAX_STALENESS = 8
STARVED_S = 60.0
CHECKED_SAMPLES = 4 * SAMPLES
SAMPLING = SamplingParams(max_new_tokens=ANSWER_TOKENS, temperature=1.0, stop_token_ids=(EOS,))


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step. number: from 1, also the version it made. at: seconds since training began.

    reward: mean over the batch's samples, as the pool generated them. stale: its tokens by staleness in versions.
    tokens: received by now. waited: seconds without a complete batch. gap_sum, gap_tokens: |log-probability gap|.
    """

    number: int
    at: float
    reward: float
    loss: float
    stale: Counter[int]
    tokens: int
    waited: float
    gap_sum: float
    gap_tokens: int


@dataclass(slots=True)
class Trainer:
    """The training loop. Call `run` once.

    `AHEAD` batches of `GROUPS` prompts are in flight while one is learned from. That bounds how stale samples usually
    are; MAX_STALENESS bounds how old the weights may be that a worker starts a sample with.
    """

    client: BlockingRolloutClient
    publisher: WeightPublisher
    learner: Learner
    rng: np.random.Generator
    tally: Tally = field(default_factory=Tally)
    steps: list[Step] = field(default_factory=list)
    published: list[PublishHandle] = field(default_factory=list)
    began: float = 0.0
    _problems: dict[str, Problem] = field(default_factory=dict)

    def run(self, goes_on: Callable[[int], bool], on_step: Callable[[Step], None]) -> None:
        """Train while `goes_on(steps so far)`, then take the results that are still under way, to count them.

        Raises WaitTimeout if the pool delivers nothing for STARVED_S seconds.
        """
        self.began = time.monotonic()
        self._submit(AHEAD * GROUPS)
        arriving = self.client.groups(STARVED_S)
        while goes_on(len(self.steps)):
            began = time.monotonic()
            groups = self._take(arriving)
            waited = time.monotonic() - began
            self._submit(GROUPS)  # before the step, so that the pool has work during it
            on_step(self._learn(groups, waited))
        for group in arriving:
            self.tally.received(group)
        self.tally.duplicates += self.client.repeats  # those never reach a group

    @property
    def seconds(self) -> float:
        """Seconds from the first submission to the last step."""
        return self.steps[-1].at if self.steps else 0.0

    def _submit(self, count: int) -> None:
        problems = [draw(self.rng) for _ in range(count)]
        jobs = [
            GenerateJob(token_ids=problem.prompt, n=SAMPLES, sampling=SAMPLING, max_staleness=MAX_STALENESS)
            for problem in problems
        ]
        for problem, handle in zip(problems, self.client.submit_many(jobs), strict=True):
            self._problems[handle.group_id] = problem
            self.tally.submitted(handle.job_id, handle.n)

    def _take(self, arriving: Iterator[Group]) -> list[tuple[Problem, tuple[RolloutResult, ...]]]:
        """The next GROUPS groups in the order in which they are complete. Groups with a failure are left out."""
        taken: list[tuple[Problem, tuple[RolloutResult, ...]]] = []
        for group in arriving:
            self.tally.received(group)
            problem = self._problems.pop(group.group_id)
            if group.ok:
                taken.append((problem, group.results))
            if len(taken) == GROUPS:
                break
        return taken

    def _learn(self, groups: list[tuple[Problem, tuple[RolloutResult, ...]]], waited: float) -> Step:
        stale = self.tally.used([result for _, results in groups for result in results], self.learner.version)
        batch = make_batch(groups)
        gaps = self.learner.logprob_gaps(batch.head(CHECKED_SAMPLES))
        loss = self.learner.step(batch)
        version = self.learner.version
        self.published.append(self.publisher.publish(version, self.learner.model.named_parameters()))
        step = Step(
            number=version,
            at=time.monotonic() - self.began,
            reward=batch.reward,
            loss=loss,
            stale=stale,
            tokens=self.tally.tokens,
            waited=waited,
            gap_sum=float(gaps.sum()),
            gap_tokens=gaps.numel(),
        )
        self.steps.append(step)
        return step
