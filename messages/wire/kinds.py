"""Which messages are jobs, and which are what comes of them."""

from __future__ import annotations

from ..model.embed import EmbedJob, EmbedResult, RewardJob, RewardResult
from ..model.jobs import GenerateJob
from ..model.results import RolloutResult
from ..model.score import ScoreJob, ScoreResult
from ..model.tasks import TaskJob, TaskResult

Job = GenerateJob | TaskJob
Result = RolloutResult | TaskResult

JOBS: tuple[type[GenerateJob] | type[TaskJob], ...] = (GenerateJob, EmbedJob, RewardJob, ScoreJob)
RESULTS: tuple[type[RolloutResult] | type[TaskResult], ...] = (RolloutResult, EmbedResult, RewardResult, ScoreResult)
