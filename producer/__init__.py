"""What a trainer uses: the client, and commands to the workers, each for asyncio and for plain loops."""

from .blocking import BlockingJobHandle, BlockingPoolControl, BlockingRolloutClient, BlockingSession
from .calls import Delta, Prompt, Session, similarity
from .client import RolloutClient
from .control import Answer, Answers, CommandFailed, PoolAudit, PoolControl
from .inbox import Group, Handle, JobHandle, Outcome

__all__ = [
    "Answer",
    "Answers",
    "BlockingJobHandle",
    "BlockingPoolControl",
    "BlockingRolloutClient",
    "BlockingSession",
    "CommandFailed",
    "Delta",
    "Group",
    "Handle",
    "JobHandle",
    "Outcome",
    "PoolAudit",
    "PoolControl",
    "Prompt",
    "RolloutClient",
    "Session",
    "similarity",
]
