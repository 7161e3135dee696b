"""RolloutMQ: a pool that generates rollouts for reinforcement learning, on Redis.

A trainer needs `RolloutClient` (or `BlockingRolloutClient`) and `WeightPublisher`; the latter needs torch and is only
imported when it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .messages import (
    ChatMessage,
    ClientBusy,
    FeatureUnavailable,
    GenerateJob,
    InvalidField,
    JobFailed,
    JobFailure,
    LogitProcessor,
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
from .messages.dialects.translate import job_fields
from .producer import BlockingRolloutClient, Delta, Group, JobHandle, RolloutClient, Session

if TYPE_CHECKING:
    from .producer import BlockingPoolControl
    from .producer.control import PoolControl
    from .producer.skyrl import SkyRLEngine
    from .sync import PublishHandle, PublishProgress, PublishReport, WeightPublisher, strip_wrappers, unfuse_experts

__version__ = "0.1.0"
__all__ = [
    "BlockingPoolControl",
    "BlockingRolloutClient",
    "ChatMessage",
    "ClientBusy",
    "Delta",
    "FeatureUnavailable",
    "GenerateJob",
    "Group",
    "InvalidField",
    "JobFailed",
    "JobFailure",
    "JobHandle",
    "LogitProcessor",
    "LogprobOptions",
    "NotReplicated",
    "PoolBusy",
    "PoolControl",
    "PublishHandle",
    "PublishProgress",
    "PublishReport",
    "RedisRefused",
    "RedisUnavailable",
    "RolloutClient",
    "RolloutMQError",
    "RolloutResult",
    "SamplingParams",
    "Segment",
    "Session",
    "SkyRLEngine",
    "WaitTimeout",
    "WeightPublisher",
    "job_fields",
    "new_id",
    "strip_wrappers",
    "unfuse_experts",
]
_LAZY = {
    "BlockingPoolControl": "producer",
    "PoolControl": "producer.control",
    "PublishHandle": "sync",
    "PublishProgress": "sync",
    "PublishReport": "sync",
    "SkyRLEngine": "producer.skyrl",
    "WeightPublisher": "sync",
    "strip_wrappers": "sync",
    "unfuse_experts": "sync",
}
"""Names whose modules are imported when they are used: they pull torch, or not every trainer wants them."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
