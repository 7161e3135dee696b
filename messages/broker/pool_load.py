"""How much is in a pool, and what has happened in it: the queues' lengths and the counters of the hash `load`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..redis import Keys, whole


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """How much is in a pool. queued: jobs per priority class, highest first. suspects: jobs on their last chance.

    set_aside: how many keys were ever renamed because what they held was in the way. accepted, done, cancelled,
    expired, dead, attempts, redelivered, leases_lost and taken_bytes are totals since the pool began. attempts: how
    often a worker has claimed a job; redelivered: how often one that a worker had had before. leases_lost: workers that
    fell silent for a whole lease. taken_bytes: of results that their clients have acknowledged, or that somebody has
    dropped. session_bytes: turns of recorded sessions. sessions_expired: how many ended with nobody having taken them.
    answer_bytes: answers that gateways keep for repeats.
    """

    queued: tuple[int, ...]
    suspects: int
    open_jobs: int
    open_bytes: int
    unread_bytes: int
    letter_bytes: int
    saved_bytes: int
    session_bytes: int
    answer_bytes: int
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
    sessions_expired: int


async def read_load(redis: Any, keys: Keys) -> PoolLoad:
    """Read it, in one round trip: two commands for each priority class and two more."""
    async with redis.pipeline(transaction=False) as pipe:
        for queue, later in zip(keys.queues, keys.later, strict=True):
            pipe.zcard(queue)
            pipe.zcard(later)
        pipe.llen(keys.suspects)
        pipe.hgetall(keys.load)
        *counts, suspects, counters = await pipe.execute()

    names = [it.name for it in fields(PoolLoad) if it.name not in {"queued", "suspects"}]
    counted = {name: whole(counters.get(_COUNTERS.get(name, name).encode())) for name in names}
    queued = tuple(counts[i] + counts[i + 1] for i in range(0, len(counts), 2))
    return PoolLoad(queued=queued, suspects=suspects, **counted)


_COUNTERS = {
    "open_jobs": "jobs",
    "open_bytes": "bytes",
    "unread_bytes": "unread",
    "letter_bytes": "letters",
    "saved_bytes": "saved",
    "answer_bytes": "answered",
    "cap_bytes": "cap",
    "set_aside": "aside",
    "taken_bytes": "taken",
}
"""Fields of `load` under other names."""
