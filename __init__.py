"""RolloutMQ: a pool that generates rollouts for reinforcement learning, on Redis.

A trainer needs `RolloutClient` (or `BlockingRolloutClient`) and `WeightPublisher`. Names are imported when they are
used: `WeightPublisher` and what belongs to it need torch.
"""

from typing import TYPE_CHECKING

from ._lazy import lazy

if TYPE_CHECKING:
    from .messages import (
        ChatMessage,
        ClientBusy,
        ClientReplaced,
        FeatureUnavailable,
        GenerateJob,
        InvalidField,
        JobFailed,
        JobFailure,
        LogitProcessor,
        LogprobOptions,
        NotOnDisk,
        NotReplicated,
        PoolBusy,
        RedisRefused,
        RedisUnavailable,
        RolloutMQError,
        RolloutResult,
        SamplingParams,
        Segment,
        WaitTimeout,
        WrongLoop,
        WrongProcess,
        new_id,
    )
    from .messages.dialects import job_fields
    from .producer import (
        BlockingJobHandle,
        BlockingPoolControl,
        BlockingRolloutClient,
        BlockingSession,
        Delta,
        Environment,
        Episode,
        EpisodeLimits,
        Group,
        GroupRules,
        JobHandle,
        PoolControl,
        RolloutClient,
        RolloutFeed,
        Session,
        Staleness,
        TrainGroup,
        figures,
        log_figures,
    )
    from .producer.skyrl import SkyRLEngine
    from .producer.training.batch import RolloutBatch
    from .sync import PublishHandle, PublishProgress, PublishReport, WeightPublisher, strip_wrappers, unfuse_experts

__version__ = "0.1.0"
__all__ = [
    "BlockingJobHandle",
    "BlockingPoolControl",
    "BlockingRolloutClient",
    "BlockingSession",
    "ChatMessage",
    "ClientBusy",
    "ClientReplaced",
    "Delta",
    "Environment",
    "Episode",
    "EpisodeLimits",
    "FeatureUnavailable",
    "GenerateJob",
    "Group",
    "GroupRules",
    "InvalidField",
    "JobFailed",
    "JobFailure",
    "JobHandle",
    "LogitProcessor",
    "LogprobOptions",
    "NotOnDisk",
    "NotReplicated",
    "PoolBusy",
    "PoolControl",
    "PublishHandle",
    "PublishProgress",
    "PublishReport",
    "RedisRefused",
    "RedisUnavailable",
    "RolloutBatch",
    "RolloutClient",
    "RolloutFeed",
    "RolloutMQError",
    "RolloutResult",
    "SamplingParams",
    "Segment",
    "Session",
    "SkyRLEngine",
    "Staleness",
    "TrainGroup",
    "WaitTimeout",
    "WeightPublisher",
    "WrongLoop",
    "WrongProcess",
    "figures",
    "job_fields",
    "log_figures",
    "new_id",
    "strip_wrappers",
    "unfuse_experts",
]
__getattr__, __dir__ = lazy(
    __name__,
    __all__,
    ".messages",
    ".messages.dialects",
    ".producer",
    ".sync",
    ".producer.skyrl",
    ".producer.training.batch",
)
