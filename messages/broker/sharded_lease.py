"""A worker's leases in all shards of a pool, as one: it claims from them in turn, and each job's shard hears of it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from ..errors import LeaseLost
from ..redis import Keys, shard_of
from ..scripts import Scripts, calls
from .lease import Claim, Finished, Lease, Piece, Release
from .sharded_broker import every, routed

log = logging.getLogger(__name__)
T = TypeVar("T")
CLAIM_S = 1.0
"""A shard that has not answered a claim after so many seconds is left out until its next heartbeat gets through."""
SHARE_S = 1.0
"""So long what a claim said of a share is compared with the shares in other shards."""
TELL_S = 2.0
AWAY = "away"
"""The state of a piece whose shard does not answer. It was perhaps kept, and may be sent again."""


class ShardedLease(Lease):
    """Over one lease for each shard. They are joined and renewed one by one (`parts`), and one may be lost alone.

    A shard that does not answer, or in which the lease is lost, is left out (`in_doubt`): the others go on.
    """

    def __init__(self, parts: Sequence[Lease]) -> None:
        home = parts[0]
        super().__init__(home.redis, home.keys.pool, home.worker_id, home.lease_s)
        self._parts = tuple(parts)
        self._next = random.randrange(len(parts))  # so that many workers do not all begin with the same one

    @property
    def parts(self) -> tuple[Lease, ...]:
        return self._parts

    def part_of(self, job_id: str) -> Lease:
        return self._parts[shard_of(job_id, len(self._parts))]

    def begin_with(self, part: Lease) -> None:
        self._next = part.keys.shard

    def _carried(self, part: Lease) -> int:
        """Samples that the worker has in the other shards beyond its shares there, by claims of just now.

        Each shard rounds a worker's share to whole jobs. So what one rounds up the next one rounds down.
        """
        newest = time.monotonic() - SHARE_S
        others = (one for one in self._parts if one is not part and one.share < math.inf and one.claimed_at > newest)
        carried = sum(one.holds() - one.share for one in others if one.holds is not None)
        return math.floor(carried + 0.5) if carried > 0 else math.ceil(carried - 0.5)  # a half counts, too

    async def claim(
        self, max_jobs: int, max_samples: int, version: int, adapters: Mapping[str, int] | None = None, carried: int = 0
    ) -> list[Claim]:
        """Take jobs from the first shard that has some, beginning with the one behind the last that was asked.

        If the answer is lost, or comes too late, the next claim in that shard gives the same jobs. Raises nothing for a
        shard that is lost.
        """
        self.again_s = 0.0
        for _ in self._parts:
            part = self._parts[self._next]
            self._next = (self._next + 1) % len(self._parts)
            if part.in_doubt:
                continue
            try:
                async with asyncio.timeout(CLAIM_S):
                    claims = await part.claim(max_jobs, max_samples, version, adapters, self._carried(part))
            except (LeaseLost, RedisError, OSError) as error:  # TimeoutError is an OSError
                log.warning("shard %d gives nothing for now: %s", part.keys.shard, str(error) or "it is silent")
                part.in_doubt = True
            else:
                self.again_s = min(filter(None, (self.again_s, part.again_s)), default=0.0)
                if claims:
                    return claims
        return []

    async def complete(self, finished: Sequence[Finished]) -> list[str]:
        return await self._routed(finished, lambda part, some: part.complete(some))

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[str]:
        """As Lease.checkpoint; "away" for a piece whose shard does not answer. Raises if none of them does, and what a
        script says of data."""

        async def send(part: Lease, some: list[Piece]) -> list[str]:
            if not part.in_doubt:
                try:
                    return await part.checkpoint(some)
                except (RedisError, OSError) as error:
                    if type(error) is ResponseError:
                        raise
                    failed.append(error)
            return [AWAY] * len(some)

        failed: list[Exception] = []
        states = await self._routed(pieces, send)
        if failed and all(state == AWAY for state in states):
            raise failed[0]
        return states

    async def release(self, jobs: Sequence[Release], max_lost: int, to: str = "") -> list[str]:
        return await self._routed(jobs, lambda part, some: part.release(some, max_lost, to))

    async def bury(self, job_id: str, attempt: int, cause: str, host: str, error: str) -> bool:
        return await self.part_of(job_id).bury(job_id, attempt, cause, host, error)

    async def expire(self, job_id: str, attempt: int) -> bool:
        return await self.part_of(job_id).expire(job_id, attempt)

    async def leave(self) -> int:
        return sum(await every(part.leave() for part in self._parts))

    async def learn(self, committed: int, adapters: Mapping[str, int]) -> None:
        await every(part.learn(committed, adapters) for part in self._parts)

    async def _routed(self, items: Sequence[T], send: Callable[[Lease, list[T]], Awaitable[list[str]]]) -> list[str]:
        """A state for each item, from its job's shard. Raises the first error when all shards have been asked."""
        ids = [item.job_id for item in items]  # type: ignore[attr-defined]
        return await routed(ids, self._parts, lambda part, at: send(part, [items[place] for place in at]))


async def tell_shards(redis: Redis, pool: str, committed: int, adapters: Mapping[str, int]) -> None:
    """Tell all shards but the home of what the home has committed. Raises nothing: a worker's next heartbeat in a shard
    that did not hear of it tells it again."""

    async def tell(shard: int, its: Redis) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                await Scripts(its, Keys(pool, shard)).run(calls.learn(committed, *adapters.items()))
        except (RedisError, OSError) as error:
            log.warning("shard %d has not heard of version %d yet: %s", shard, committed, str(error) or "it is silent")

    await asyncio.gather(*(tell(shard, its) for shard, its in enumerate(getattr(redis, "shards", ())) if shard))
