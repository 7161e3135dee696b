"""Every error that RolloutMQ raises, in one tree under :class:`RolloutMQError`.

An error about a value names the field, the value and what is allowed, so the text alone is enough to fix the call.
"""

from __future__ import annotations

import os
import reprlib

from redis.exceptions import ConnectionError, RedisError, ResponseError


class RolloutMQError(Exception):
    """Root of the tree: ``except RolloutMQError`` catches every error that this package raises on purpose."""


# --- messages -------------------------------------------------------------------------------------------------------


class MessageError(RolloutMQError):
    """A message cannot be used. Workers dead-letter the entry and continue with the next."""


class MalformedMessage(MessageError):
    """The bytes are not a message: truncated, oversized, nested too deep, or not msgpack."""


class UnsupportedVersion(MessageError):
    """The message was written by a newer major version of the wire format."""


class InvalidField(MessageError):
    """A field has a value that is not allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={shortly(value)}: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.field, self.value, self.allowed))


def shortly(value: object) -> str:
    """The value in at most 120 characters. It may be of any size, and nested to any depth."""
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        shown = f"<{type(value).__name__}, too large to show>"
    return shown if len(shown) <= 120 else shown[:117] + "..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = 40
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 120


class FeatureUnavailable(InvalidField):
    """A job needs a feature that no worker of the pool has. `allowed` names the engines."""


# --- queue ----------------------------------------------------------------------------------------------------------


class PoolBusy(RolloutMQError):
    """The pool accepts no more jobs for now. It accepted only the first `accepted` jobs of this call.

    reason: the limit that was reached: "jobs" (open jobs), "bytes" (payloads of open jobs and unread results), "unread"
        (this client's unread results), or "memory" (Redis' maxmemory).
    states: the states of the accepted jobs, as Broker.enqueue returns them.
    beyond: places of further jobs of this call that are in all the same. Only a pool with several shards has them: one
        of them was full, and others were not. Submit the others again, with their ids.
    """

    def __init__(
        self, message: str, states: list[str], reason: str = "jobs", beyond: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(message)
        self.beyond = beyond
        self.accepted = len(states)
        self.states = states
        self.reason = reason


class ClientBusy(RolloutMQError):
    """This client has more outstanding samples than it may hold in memory."""


class ClientReplaced(RolloutMQError):
    """Another client with the same `client_id` was opened later, in this process or another one. It gets the results
    that this one has not acknowledged, and this one gets none any more."""

    def __init__(self, client_id: str) -> None:
        super().__init__(f"client {client_id} was opened again elsewhere, which gets its results from now on")
        self.client_id = client_id

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.client_id,))


class WaitTimeout(RolloutMQError, TimeoutError):
    """A wait reached its deadline. Nothing is lost: you can wait for the same results again.

    why: what keeps the jobs from running, and what to do about it; "" if that is not known, or the wait was too short
    to ask.
    """

    def __init__(self, told: str, why: str = "") -> None:
        super().__init__(f"{told}. {why}" if why else told)
        self.told, self.why = told, why

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.told, self.why))


class LeaseLost(RolloutMQError):
    """This worker's lease ran out. Its jobs belong to other workers now."""


class JobFailed(RolloutMQError):
    """A job ended without all its samples. ``failure`` is the :class:`~rolloutmq.messages.model.results.JobFailure`."""

    def __init__(self, failure: object) -> None:
        super().__init__(str(failure))
        self.failure = failure


class NoSuchDeadLetter(RolloutMQError):
    """There is no letter with this entry id. It was requeued, dropped, or displaced by newer ones."""


class CannotRequeue(RolloutMQError):
    """A letter's payload cannot become a job. The text says why. The letter can be shown and dropped."""


class NoSuchSession(RolloutMQError):
    """There is no such recorded session: no turn has come to it yet, or it has expired. forgotten: or it was deleted
    within the last hour."""

    def __init__(self, message: str, forgotten: bool = False) -> None:
        super().__init__(message)
        self.forgotten = forgotten

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.forgotten))


class TurnRefused(RolloutMQError):
    """A turn was not recorded.

    reason: "taken" (the session was taken or forgotten: it takes no further turns), "turns", "tokens" or "bytes" (the
    session is as long as one may be), "pool" (all sessions together have their part of the pool's bytes) or "memory"
    (Redis' maxmemory). After the last two it can be recorded later.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.reason))


# --- engine ---------------------------------------------------------------------------------------------------------


class EngineError(RolloutMQError):
    """Something is wrong with the inference engine."""


class EngineDead(EngineError):
    """The engine's processes are gone. Everything that ran in them has to run again."""


class RequestRefused(EngineError):
    """The engine cannot run this request, and no other worker of this kind could. The job is dead-lettered."""


# --- weights --------------------------------------------------------------------------------------------------------


class WeightSyncError(RolloutMQError):
    """A weights version did not reach a worker, or any worker."""


class DigestMismatch(WeightSyncError):
    """The tensors that arrived differ from those that were sent. The version is refused."""


class TransferTimeout(WeightSyncError):
    """A weight transfer did not finish by its deadline. Its receivers continue with the old weights."""


# --- surroundings ---------------------------------------------------------------------------------------------------


class ConfigError(RolloutMQError):
    """A setting is missing, unknown or contradictory."""


class LayoutMismatch(ConfigError):
    """The pool's servers have other shards than the Redis URL names. Nothing was read or written."""


# The errors about Redis are also redis-py's errors, so `except RedisError` around a retry loop catches them all.


class RedisUnavailable(RolloutMQError, ConnectionError):
    """No redis-server could be reached or started, or the server was not ready in time: it loads, is a replica, or its
    cluster is reorganising. Repeating the call later is safe."""


class WrongProcess(RolloutMQError):
    """A client is used in a forked child of the process that made it. Make a new client there.

    A forked child has none of the threads, and shares the sockets with its parent: what it sent would mix with the
    parent's commands.
    """

    def __init__(self, what: str, pid: int) -> None:
        super().__init__(f"{what} belongs to process {pid}, and this is process {os.getpid()}: make a new one here")
        self.what, self.pid = what, pid

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.pid))


class WrongLoop(RolloutMQError):
    """A client is used on another event loop than the one it was opened on, as by a second `asyncio.run`.

    Open and close a client within one `asyncio.run`. A new client of the same `client_id` goes on with what the old one
    left. The classes whose names begin with Blocking bring a loop of their own, and work from any thread and any loop.
    """

    def __init__(self, what: str, ended: bool) -> None:
        super().__init__(
            f"{what} belongs to another event loop, which {'has ended' if ended else 'still runs'}: make a new one in "
            "each asyncio.run (the same client_id goes on with its jobs), or use BlockingRolloutClient"
        )
        self.what, self.ended = what, ended

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.what, self.ended))


class RedisRefused(RolloutMQError, ResponseError):
    """Redis answers but accepts no writes. Nothing of the call was written. Repeating the call later is safe.

    reason: "memory" (maxmemory is reached), "disk" (it cannot save its data), "replicas" (fewer than its
    min-replicas-to-write are connected) or "durable" (it cannot promise what ?durable= in the URL asks for).
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.reason))


class NotReplicated(RolloutMQError, RedisError):
    """The primary has the write, but fewer replicas than `min_replicas` confirmed it in time, so a failover could lose
    it. Repeating the call is safe, because jobs keep their ids."""


class NotOnDisk(RolloutMQError, RedisError):
    """The server has the write in memory, but did not confirm in time that it is on its disk, so a crash of the server
    could lose it. Repeating the call is safe, because jobs keep their ids."""
