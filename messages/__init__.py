"""What travels between trainers, workers and operators, and the Redis queue it travels on."""

from .broker.broker import Broker, Caps, PoolLoad, Reply
from .broker.lease import Beat, Claim, Finished, Lease, Piece, Release
from .codec import decode, encode
from .errors import (
    ClientBusy,
    ConfigError,
    DigestMismatch,
    EngineDead,
    EngineError,
    FeatureUnavailable,
    InvalidField,
    JobFailed,
    LeaseLost,
    MalformedMessage,
    MessageError,
    NotReplicated,
    PoolBusy,
    RedisRefused,
    RedisUnavailable,
    RequestRefused,
    RolloutMQError,
    TransferTimeout,
    UnsupportedVersion,
    WaitTimeout,
    WeightSyncError,
)
from .ids import new_id
from .model.chat import ChatMessage
from .model.jobs import GenerateJob
from .model.results import JobFailure, Partial, RolloutResult, Segment, Timings
from .model.sampling import LogitProcessor, LogprobOptions, SamplingParams
from .model.weights import TensorSpec, WeightAnnouncement, WeightManifest
from .model.workers import DeadLetter, WorkerStatus
from .redis.connection import connect
from .redis.keys import Keys

__all__ = [
    "Beat",
    "Broker",
    "Caps",
    "ChatMessage",
    "Claim",
    "ClientBusy",
    "ConfigError",
    "DeadLetter",
    "DigestMismatch",
    "EngineDead",
    "EngineError",
    "FeatureUnavailable",
    "Finished",
    "GenerateJob",
    "InvalidField",
    "JobFailed",
    "JobFailure",
    "Keys",
    "Lease",
    "LeaseLost",
    "LogitProcessor",
    "LogprobOptions",
    "MalformedMessage",
    "MessageError",
    "NotReplicated",
    "Partial",
    "Piece",
    "PoolBusy",
    "PoolLoad",
    "RedisRefused",
    "RedisUnavailable",
    "Release",
    "Reply",
    "RequestRefused",
    "RolloutMQError",
    "RolloutResult",
    "SamplingParams",
    "Segment",
    "TensorSpec",
    "Timings",
    "TransferTimeout",
    "UnsupportedVersion",
    "WaitTimeout",
    "WeightAnnouncement",
    "WeightManifest",
    "WeightSyncError",
    "WorkerStatus",
    "connect",
    "decode",
    "encode",
    "new_id",
]
