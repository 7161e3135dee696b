"""What travels between trainers, workers and operators, and the Redis queue it travels on."""

from .broker import Broker, Caps, PoolLoad, Reply
from .chat import ChatMessage
from .codec import decode, encode
from .connection import connect
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
from .jobs import GenerateJob
from .keys import Keys
from .lease import Beat, Claim, Finished, Lease, Piece, Release
from .pool import DeadLetter, WorkerStatus
from .results import JobFailure, Partial, RolloutResult, Segment, Timings
from .sampling import LogitProcessor, LogprobOptions, SamplingParams
from .weights import TensorSpec, WeightAnnouncement, WeightManifest

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
