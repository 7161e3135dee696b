"""What a trainer uses: the client, and commands to the workers, each for asyncio and for plain loops."""

from .blocking import (
    BlockingJobHandle,
    BlockingPoolControl,
    BlockingRolloutClient,
    BlockingRolloutFeed,
    BlockingSession,
)
from .calls import Delta, Prompt, Session, similarity
from .client import RolloutClient
from .control import Answer, Answers, CommandFailed, PoolAudit, PoolControl
from .episodes import Environment, Episode, EpisodeLimits, RecordedSession
from .figures import figures, log_figures
from .inbox import Group, Handle, JobHandle, Outcome
from .training import GroupRules, RolloutFeed, Staleness, TrainGroup, rewards_differ

__all__ = [
    "Answer",
    "Answers",
    "BlockingJobHandle",
    "BlockingPoolControl",
    "BlockingRolloutClient",
    "BlockingRolloutFeed",
    "BlockingSession",
    "CommandFailed",
    "Delta",
    "Environment",
    "Episode",
    "EpisodeLimits",
    "Group",
    "GroupRules",
    "Handle",
    "JobHandle",
    "Outcome",
    "PoolAudit",
    "PoolControl",
    "Prompt",
    "RecordedSession",
    "RolloutClient",
    "RolloutFeed",
    "Session",
    "Staleness",
    "TrainGroup",
    "figures",
    "log_figures",
    "rewards_differ",
    "similarity",
]
