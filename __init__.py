"""RolloutMQ: a pool that generates rollouts for reinforcement learning, on Redis.

A trainer needs `RolloutClient` (or `BlockingRolloutClient`) and `WeightPublisher`; the latter needs torch and is only
imported when it is used.
"""

from typing import TYPE_CHECKING, Any

from .messages import (
    ChatMessage,
    ClientBusy,
    GenerateJob,
    InvalidField,
    JobFailed,
    JobFailure,
    LogprobOptions,
    NotReplicated,
    PoolBusy,
    RedisRefused,
    RedisUnavailable,
    RolloutMQError,
    RolloutResult,
    SamplingParams,
    Segment,
    WaitTimeout,
    new_id,
)
from .producer import BlockingRolloutClient, Group, JobHandle, RolloutClient

if TYPE_CHECKING:
    from .sync.publisher import PublishHandle, PublishReport, WeightPublisher

__version__ = "0.1.0"
__all__ = [
    "BlockingRolloutClient",
    "ChatMessage",
    "ClientBusy",
    "GenerateJob",
    "Group",
    "InvalidField",
    "JobFailed",
    "JobFailure",
    "JobHandle",
    "LogprobOptions",
    "NotReplicated",
    "PoolBusy",
    "PublishHandle",
    "PublishReport",
    "RedisRefused",
    "RedisUnavailable",
    "RolloutClient",
    "RolloutMQError",
    "RolloutResult",
    "SamplingParams",
    "Segment",
    "WaitTimeout",
    "WeightPublisher",
    "new_id",
]


def __getattr__(name: str) -> Any:
    if name in {"WeightPublisher", "PublishHandle", "PublishReport"}:
        from .sync import publisher  # noqa: PLC0415 – pulls torch

        return getattr(publisher, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
