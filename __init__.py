"""RolloutMQ: a pool that generates rollouts for reinforcement learning, on Redis.

A trainer needs `RolloutClient` (or `BlockingRolloutClient`) and `WeightPublisher`; the latter needs torch and is only
imported when it is used.
"""

from importlib import import_module
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
    from .sync.experts import unfuse_experts
    from .sync.gather import strip_wrappers
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
    "strip_wrappers",
    "unfuse_experts",
]
_LAZY = {
    "PublishHandle": "publisher",
    "PublishReport": "publisher",
    "WeightPublisher": "publisher",
    "strip_wrappers": "gather",
    "unfuse_experts": "experts",
}
"""Names whose modules in `sync` pull torch."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".sync.{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
