"""The queue's two sides: what producers and operators do with jobs, and what a worker does under its lease."""

from .broker import PIECES_COUNT, Broker, Caps
from .clock import Witness, living_workers
from .command_channel import CommandBox, CommandSender
from .dead_letters import DeadFilter, DeadLetters, LetterHead, successor
from .lease import MAX_CALL_BYTES, Beat, Claim, Finished, Lease, Piece, Release
from .needs import Waiting, can_of, kin_of, needed, total_of
from .pool_load import PoolLoad
from .recorded_sessions import RecordedSessions, SessionSummary
from .records import read_jobs
from .replies import Frames, Receipt, Reply
from .sharded_broker import ShardedBroker, broker_of, sum_of
from .sharded_lease import AWAY, ShardedLease, tell_shards
from .submissions import BATCH_BYTES

__all__ = [
    "AWAY",
    "BATCH_BYTES",
    "MAX_CALL_BYTES",
    "PIECES_COUNT",
    "Beat",
    "Broker",
    "Caps",
    "Claim",
    "CommandBox",
    "CommandSender",
    "DeadFilter",
    "DeadLetters",
    "Finished",
    "Frames",
    "Lease",
    "LetterHead",
    "Piece",
    "PoolLoad",
    "Receipt",
    "RecordedSessions",
    "Release",
    "Reply",
    "SessionSummary",
    "ShardedBroker",
    "ShardedLease",
    "Waiting",
    "Witness",
    "broker_of",
    "can_of",
    "kin_of",
    "living_workers",
    "needed",
    "read_jobs",
    "successor",
    "sum_of",
    "tell_shards",
    "total_of",
]
