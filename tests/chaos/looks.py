"""What the driver sees of a pool from outside, in all of its shards."""

from __future__ import annotations

from typing import Protocol

from support.pools.pool import eventually

from rolloutmq.messages import Broker
from rolloutmq.messages.broker import LetterHead
from rolloutmq.messages.broker.dead_letters import DeadLetters


class HasId(Protocol):
    """Something that is a worker, under this id."""

    @property
    def id(self) -> str: ...


def part_of(broker: Broker, job_id: str) -> Broker:
    """The broker of the shard that has this job."""
    return next(part for part in broker.parts if part.has(job_id))


async def held(broker: Broker, worker_id: str) -> set[str]:
    """Ids of the jobs that a worker holds."""
    found = [await part.redis.smembers(part.keys.held(worker_id)) for part in broker.parts]
    return {job_id.decode() for ids in found for job_id in ids}


async def running(broker: Broker, at_least: int, timeout: float = 15.0) -> None:
    """Return once workers hold this many jobs."""

    async def enough() -> bool:
        count = 0
        for part in broker.parts:
            for worker in await part.redis.zrange(part.keys.workers, 0, -1):
                count += await part.redis.scard(part.keys.held(worker.decode()))
        return count >= at_least

    await eventually(enough, timeout, f"{at_least} jobs held")


async def left(broker: Broker, worker_id: str) -> bool:
    """Whether a worker has no lease any more, in any shard."""
    leases = [await part.redis.zscore(part.keys.workers, worker_id) for part in broker.parts]
    return all(lease is None for lease in leases)


async def serving(broker: Broker, worker: HasId, timeout: float = 15.0) -> None:
    """Return once a worker has a lease in every shard. In a pool with one shard it has a new id with each lease."""

    async def everywhere() -> bool:
        leases = [await part.redis.zscore(part.keys.workers, worker.id) for part in broker.parts]
        return None not in leases

    await eventually(everywhere, timeout, f"{worker.id} to serve again")


async def letters(broker: Broker) -> list[LetterHead]:
    """The newest dead letters of each shard."""
    return [letter for part in broker.parts for letter in await DeadLetters(part).page()]
