"""One look at a pool for the exporter and the scaler: the reading that everybody has, and what only they count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from ...messages.broker import Broker, broker_of, read_jobs
from ...messages.errors import MessageError, RedisUnavailable
from ...messages.model import MAX_SAMPLES, PRIORITIES
from ...messages.redis import PoolRedis, is_wrong_type, text, whole
from ...producer.diagnosis import PoolReading, read_pool
from ...sync.transfer import Epoch, Ledger
from ..sharing import Sharing, read_sharing

HEADS = 16
"""Jobs at the front of each queue, and of each set of jobs that wait, whose samples are counted."""
TRANSFERS = 16
"""Transfers that one look is about at most, the newest."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A pool at one moment, all of its shards.

    samples_per_job: unpublished samples of a queued job, by class; the mean of those at the front. ended: transfers of
    weights and adapters that have ended since the look before. max_staleness: the largest that the jobs at the front
    allow; None if none of them says so. sharing: how evenly the workers are loaded.
    """

    pool: PoolReading
    samples_per_job: tuple[float, ...]
    dead_letters: int = 0
    unread_clients: int = 0
    ended: tuple[Epoch, ...] = ()
    max_staleness: int | None = None
    sharing: Sharing = field(default_factory=Sharing)

    @property
    def queued_samples(self) -> float:
        """Samples that wait: queued jobs, times the samples of those in front."""
        load = self.pool.load
        return sum(count * mean for count, mean in zip(load.queued, self.samples_per_job, strict=True)) + load.suspects

    @property
    def held_back_samples(self) -> float:
        """Those of them, about, that wait for weights which nobody has published yet."""
        load, ahead = self.pool.load, self.pool.ahead
        jobs = ahead.jobs if ahead is not None else 0
        jobs += sum(count for version, count in self.pool.exact.items() if version > self.pool.committed)
        return jobs * (self.queued_samples - load.suspects) / max(1, jobs, sum(load.queued))


class PoolReader:
    """Reads one pool again and again. Raises RedisError, OSError, and RedisUnavailable if one of its shards is away:
    numbers of a part of the pool would look like a pool that has become smaller."""

    def __init__(self, redis: PoolRedis, pool: str) -> None:
        self._redis: Any = redis
        self._broker, self._ledger = broker_of(redis, pool), Ledger(redis, pool)
        self._keys = self._broker.keys
        self._seen: int | None = None  # the newest transfer that was there at the look before
        self._open: set[int] = set()

    async def read(self) -> Reading:
        pool = await read_pool(self._broker)
        for shard, why in pool.shards_away.items():
            raise RedisUnavailable(f"shard {shard} is away: {why}")
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(self._keys.weights, "epochs")
            for queue, later in zip(self._keys.queues, self._keys.later, strict=True):
                pipe.zrange(queue, 0, HEADS - 1)
                pipe.zrange(later, 0, HEADS - 1)
            newest, *heads = await pipe.execute()
        counts = [await _counts(part) for part in self._broker.parts]
        samples, max_staleness = await self._heads([heads[i] + heads[i + 1] for i in range(0, len(heads), 2)])
        return Reading(
            pool=pool,
            samples_per_job=samples,
            dead_letters=sum(dead for dead, _ in counts),
            unread_clients=max(clients for _, clients in counts),
            ended=await self._ended(whole(newest), pool.transfer),
            max_staleness=max_staleness,
            sharing=await read_sharing(self._broker.parts),
        )

    async def _heads(self, heads: list[list[bytes]]) -> tuple[tuple[float, ...], int | None]:
        """Of jobs by class: their mean number of unpublished samples by class, and the largest staleness they allow."""
        every = [text(job).rpartition(":")[2] for ids in heads for job in ids]
        rows = iter(await read_jobs(self._redis, self._keys, every, "samples", "published", "max_staleness"))
        means, bounds = list[float](), list[int]()
        for ids in heads:
            found = [next(rows) for _ in ids]
            known = [row for row in found if row.get("samples")]
            counts = [min(whole(row["samples"]), MAX_SAMPLES) - whole(row.get("published")) for row in known]
            bounds += [whole(row["max_staleness"]) for row in known if "max_staleness" in row]
            means.append(sum(max(0, count) for count in counts) / len(counts) if counts else 1.0)
        assert len(means) == len(PRIORITIES)
        return tuple(means), max(bounds, default=None)

    async def _ended(self, newest: int, under_way: int) -> tuple[Epoch, ...]:
        if self._seen is None or newest < self._seen:  # the first look; or Redis has lost its data
            self._seen, self._open = newest, {under_way} - {0}
        self._open |= set(range(max(self._seen, newest - TRANSFERS) + 1, newest + 1))
        self._open = set(sorted(self._open)[-TRANSFERS:])
        self._seen = newest
        ended = []
        for number in sorted(self._open):
            try:
                state = text(await self._redis.hget(self._keys.epoch(number), "st"))
            except ResponseError as error:
                if not is_wrong_type(error):
                    raise
                state = ""  # nobody can tell what became of it, and the rest of the pool can be shown
            if state == "open":
                continue
            if state or number < newest:  # without a state it never began, or is forgotten
                self._open.discard(number)
            try:
                epoch = await self._ledger.epoch(number) if state else None
            except MessageError:  # written by another major version
                epoch = None
            if epoch is not None:
                ended.append(epoch)
        return tuple(ended)


async def _counts(shard: Broker) -> tuple[int, int]:
    """Dead letters, and clients that have not taken all results. A client has some in every shard."""
    async with shard.redis.pipeline(transaction=False) as pipe:
        pipe.xlen(shard.keys.dead)
        pipe.hlen(shard.keys.unread)
        dead, clients = await pipe.execute()
    return int(dead), int(clients)
