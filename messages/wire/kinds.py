"""Which messages are jobs, and which are what comes of them."""

from __future__ import annotations

from ..model import (
    EmbedJob,
    EmbedResult,
    GenerateJob,
    RewardJob,
    RewardResult,
    RolloutResult,
    ScoreJob,
    ScoreResult,
    TaskJob,
    TaskResult,
)

Job = GenerateJob | TaskJob
Result = RolloutResult | TaskResult

JOBS: tuple[type[GenerateJob] | type[TaskJob], ...] = (GenerateJob, EmbedJob, RewardJob, ScoreJob)
RESULTS: tuple[type[RolloutResult] | type[TaskResult], ...] = (RolloutResult, EmbedResult, RewardResult, ScoreResult)
