"""Which messages are jobs, and which are what comes of them."""

from __future__ import annotations

from .embed import EmbedJob, EmbedResult, RewardJob, RewardResult
from .jobs import GenerateJob
from .results import RolloutResult
from .score import ScoreJob, ScoreResult
from .tasks import TaskJob, TaskResult

Job = GenerateJob | TaskJob
Result = RolloutResult | TaskResult

JOBS: tuple[type[GenerateJob] | type[TaskJob], ...] = (GenerateJob, EmbedJob, RewardJob, ScoreJob)
RESULTS: tuple[type[RolloutResult] | type[TaskResult], ...] = (RolloutResult, EmbedResult, RewardResult, ScoreResult)
