"""How much is in a pool, and what has happened in it: the queues' lengths and the counters of the hash `load`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..redis import Keys, whole


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How much is in a pool. queued: jobs per priority class, highest first. suspects: jobs on their last chance.

    set_aside: how many keys were ever renamed because what they held was in the way. accepted, done, cancelled,
    expired, dead, attempts, redelivered, leases_lost and taken_bytes are totals since the pool began. attempts: how
    often a worker has claimed a job; redelivered: how often one that a worker had had before. leases_lost: workers that
    fell silent for a whole lease. taken_bytes: of results that their clients have acknowledged, or that somebody has
    dropped.
    """

    queued: tuple[int, ...]
    suspects: int
    open_jobs: int
    open_bytes: int
    unread_bytes: int
    letter_bytes: int
    saved_bytes: int
    cap_bytes: int
    set_aside: int
    accepted: int
    done: int
    cancelled: int
    expired: int
    dead: int
    attempts: int
    redelivered: int
    leases_lost: int
    taken_bytes: int


async def read_load(redis: Any, keys: Keys) -> PoolLoad:
    """Read it, in one round trip: two commands for each priority class and two more."""
    async with redis.pipeline(transaction=False) as pipe:
        for queue, later in zip(keys.queues, keys.later, strict=True):
            pipe.zcard(queue)
            pipe.zcard(later)
        pipe.llen(keys.suspects)
        pipe.hgetall(keys.load)
        *counts, suspects, counters = await pipe.execute()

    def count(name: str) -> int:
        return whole(counters.get(name.encode()))

    return PoolLoad(
        queued=tuple(counts[i] + counts[i + 1] for i in range(0, len(counts), 2)),
        suspects=suspects,
        open_jobs=count("jobs"),
        open_bytes=count("bytes"),
        unread_bytes=count("unread"),
        letter_bytes=count("letters"),
        saved_bytes=count("saved"),
        cap_bytes=count("cap"),
        set_aside=count("aside"),
        accepted=count("accepted"),
        done=count("done"),
        cancelled=count("cancelled"),
        expired=count("expired"),
        dead=count("dead"),
        attempts=count("attempts"),
        redelivered=count("redelivered"),
        leases_lost=count("leases_lost"),
        taken_bytes=count("taken"),
    )
