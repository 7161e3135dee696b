"""Every error RolloutMQ raises, in one tree under :class:`RolloutMQError`.

An error about a value names the field, the value and what is allowed, so that the text alone is enough to fix the call.
"""

from __future__ import annotations

from redis.exceptions import ConnectionError, RedisError, ResponseError


class RolloutMQError(Exception):
    """Root of the tree: ``except RolloutMQError`` catches whatever this package raises on purpose."""


# --- messages -------------------------------------------------------------------------------------------------------


class MessageError(RolloutMQError):
    """A message cannot be used. Workers dead-letter the entry and go on with the next."""


class MalformedMessage(MessageError):
    """The bytes are not a message: truncated, oversized, nested too deep, or not msgpack."""


class UnsupportedVersion(MessageError):
    """The message was written by a newer major version of the wire format."""


class InvalidField(MessageError):
    """A field has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        try:
            shown = repr(value)
        except RecursionError:
            shown = f"<{type(value).__name__}, nested too deep to show>"
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}={shown}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.field, self.value, self.allowed))


class FeatureUnavailable(InvalidField):
    """A job asks for something that no worker of the pool can do; `allowed` says which engines lack it."""


# --- queue ----------------------------------------------------------------------------------------------------------


class PoolBusy(RolloutMQError):
    """The pool takes no more for now. The first `accepted` jobs of this call are in, no more.

    reason: "jobs" (open ones), "bytes" (payloads of open jobs and results not taken), "unread" (results that this very
    client has not taken), or "memory" (Redis is at its maxmemory).
    states: of the accepted ones, as Broker.enqueue gives them.
    """

    def __init__(self, message: str, states: list[str], reason: str = "jobs") -> None:
        super().__init__(message)
        self.accepted = len(states)
        self.states = states
        self.reason = reason


class ClientBusy(RolloutMQError):
    """This client has more samples outstanding than it promised to hold in memory."""


class WaitTimeout(RolloutMQError, TimeoutError):
    """A wait reached its deadline. Nothing is lost: what arrives later can be waited for again."""


class LeaseLost(RolloutMQError):
    """This worker's lease ran out, its jobs belong to others now."""


class JobFailed(RolloutMQError):
    """A job ended without all its samples; ``failure`` is the :class:`~rolloutmq.messages.model.results.JobFailure`."""

    def __init__(self, failure: object) -> None:
        super().__init__(str(failure))
        self.failure = failure


class NoSuchDeadLetter(RolloutMQError):
    """No letter with this entry id: requeued, dropped, or pushed out by 10,000 newer ones."""


class CannotRequeue(RolloutMQError):
    """A letter's payload cannot become a job; the text says why. It can be shown and dropped."""


# --- engine ---------------------------------------------------------------------------------------------------------


class EngineError(RolloutMQError):
    """Something is wrong with the inference engine."""


class EngineDead(EngineError):
    """The engine's processes are gone; whatever ran in them has to be run again."""


class RequestRefused(EngineError):
    """The engine cannot run this request, and no other worker of this kind could. The job is dead-lettered."""


# --- weights --------------------------------------------------------------------------------------------------------


class WeightSyncError(RolloutMQError):
    """A weights version could not be brought to a worker, or to any."""


class DigestMismatch(WeightSyncError):
    """Tensors arrived that are not the ones that were sent; the version is refused."""


class TransferTimeout(WeightSyncError):
    """A weight transfer did not finish by its deadline; who took part goes on with the old weights."""


# --- surroundings ---------------------------------------------------------------------------------------------------


class ConfigError(RolloutMQError):
    """A setting is missing, unknown or contradictory."""


# The errors about Redis are redis-py's too: `except RedisError` around a loop that tries again catches them all.


class RedisUnavailable(RolloutMQError, ConnectionError):
    """No redis-server could be reached or started, or the one there is did not get ready in time (it loads, is a
    replica, its cluster is reorganising). Doing the same again later is safe."""


class RedisRefused(RolloutMQError, ResponseError):
    """Redis is there and takes no writes; nothing of the call was written. Doing it again later is safe.

    reason: "memory" (maxmemory is reached), "disk" (it cannot save what it holds) or "replicas" (fewer than its
    min-replicas-to-write are connected).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.reason))


class NotReplicated(RolloutMQError, RedisError):
    """The primary has written it, but fewer replicas than `min_replicas` have confirmed it in time: a failover could
    lose it. Doing the same again is safe, jobs keep their ids."""
