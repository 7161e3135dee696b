"""One input of a job that generates nothing (embedding, reward, score), on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...messages.broker import Piece
from ...messages.model import EmbedJob, EmbedResult, RewardJob, RewardResult, ScoreJob, ScoreResult, TaskJob, TaskResult
from ..engine import EngineInfo, TaskOutput, TaskRequest
from .legs import JobRun, Leg
from .sample import SampleRun


@dataclass(slots=True)
class TaskRun(JobRun[TaskJob]):
    """One input of a TaskJob; what SampleRun is to a GenerateJob, and used in its place.

    start: of a score, where the continuation begins.

    It is one forward pass, so there is nothing to save or to continue. After an interruption it runs again. It runs
    again, too, if the weights changed while it was in the engine, because nobody can say which weights it saw.
    """

    start: int = 1
    finish_reason: str | None = None
    values: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    version: int = 0

    def next_request(self, version: int) -> TaskRequest:
        """The same request as before, under a name of its own."""
        embed = self.job if isinstance(self.job, EmbedJob) else None
        return TaskRequest(
            self.begin_leg(version),
            self.job.task,
            self.prompt,
            str(version),
            start=self.start,
            dimensions=embed.dimensions if embed else None,
            normalize=embed.normalize if embed else True,
        )

    def absorb(self, leg: Leg, output: TaskOutput, seconds: float) -> None:
        """Take in the answer, if it is one."""
        self._engine_s += seconds
        if output.finished and not leg.crossed:
            self.values, self.version, self.finish_reason = output.values, leg.version, "stop"

    def unsaved(self, *_progress: Any) -> Piece | None:
        """Nothing, ever."""
        return None

    def result(self, worker_id: str, info: EngineInfo) -> TaskResult:
        """As it is published."""
        job = self.job
        common = self.common(worker_id, info) | {"version": self.version, "tokens": len(self.prompt)}
        if isinstance(job, EmbedJob):
            return EmbedResult(embedding=self.values, **common)
        if isinstance(job, RewardJob):
            return RewardResult(scores=self.values, **common)
        assert isinstance(job, ScoreJob)
        shown = {"token_ids": self.prompt[self.start :]} if job.texts is not None else {}
        return ScoreResult(logprobs=self.values, **shown, **common)


Run = SampleRun | TaskRun
"""What a worker holds of a job, one for each of its samples."""
