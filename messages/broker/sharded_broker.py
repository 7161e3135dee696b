"""The broker of a pool with several shards: each call goes to the shards that it is about, at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn, TypeVar

from redis.asyncio import Redis

from ..codec import Job
from ..errors import PoolBusy
from ..model import GenerateJob
from ..redis import shard_of
from .broker import Broker, Caps
from .needs import Waiting, total_of
from .pool_load import PoolLoad
from .replies import Frames
from .submissions import batches

T = TypeVar("T")
P = TypeVar("P")
OPEN = {"new", "q", "r"}


def broker_of(redis: Redis, pool: str, caps: Caps | None = None) -> Broker:
    """The broker of a pool, over as many shards as the client's URL names."""
    return ShardedBroker(redis, pool, caps) if getattr(redis, "shards", ()) else Broker(redis, pool, caps)


class ShardedBroker(Broker):
    """What a producer or an operator does with a pool of several shards.

    A job's id decides which shard has it (`shard_of`), so each job is as safe as in a pool with one shard. Each shard
    has its part of the caps. A reply stream is in one shard: ask each of `parts`. The list of workers is the home's.
    """

    def __init__(self, redis: Redis, pool: str, caps: Caps | None = None) -> None:
        """redis: from `connect`, with a client for each shard."""
        super().__init__(redis, pool, caps)
        clients = self.redis.shards
        count = len(clients)
        share = replace(
            self.caps,
            jobs=-(-self.caps.jobs // count),
            nbytes=-(-self.caps.nbytes // count),
            unread=-(-self.caps.unread // count),
        )
        self._parts = tuple(Broker(one, pool, share, shard=shard, shards=count) for shard, one in enumerate(clients))

    @property
    def parts(self) -> tuple[Broker, ...]:
        return self._parts

    def has(self, job_id: str) -> bool:
        return True

    async def enqueue(self, jobs: Sequence[Job], letter: str = "", frames: Frames | None = None) -> list[str]:
        """As Broker.enqueue, but a full shard does not keep others from accepting jobs.

        Raises PoolBusy, which counts the jobs in front of the first that was not accepted; `beyond` names those behind
        it that were, and are open.
        """
        places = by_shard([job.id for job in jobs], len(self._parts))
        every = {shard: list(batches([jobs[place] for place in at], self.caps.payload)) for shard, at in places.items()}
        if frames is not None:
            payloads: Frames = [None] * len(jobs)
            for shard, at in places.items():
                for place, one in zip(at, (one for batch in every[shard] for one in batch), strict=True):
                    payloads[place] = one.payload
            frames += payloads
        asked = (self._parts[shard].accept(every[shard], letter) for shard in places)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        busy: PoolBusy | None = None
        states: dict[int, str] = {}
        for at, answer in zip(places.values(), answers, strict=True):
            if isinstance(answer, PoolBusy):
                busy = busy or answer
                states.update(zip(at, answer.states, strict=False))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                states.update(zip(at, answer, strict=True))
        accepted = next((place for place in range(len(jobs)) if place not in states), len(jobs))
        first = [states[place] for place in range(accepted)]
        if busy is not None:
            beyond = frozenset(place for place, state in states.items() if place > accepted and state in OPEN)
            raise PoolBusy(str(busy), first, busy.reason, beyond)
        return first

    async def cancel(self, job_ids: Sequence[str], cause: str = "cancelled by the client") -> list[str]:
        return await self._routed(job_ids, lambda part, ids: part.cancel(ids, cause))

    async def stop(self, job_ids: Sequence[str], cause: str = "stopped before it ran") -> list[str]:
        return await self._routed(job_ids, lambda part, ids: part.stop(ids, cause))

    async def cancel_client(
        self, client_id: str, group_id: str | None = None, cause: str = "cancelled with all its client's jobs"
    ) -> int:
        return sum(await every(part.cancel_client(client_id, group_id, cause) for part in self._parts))

    async def open_jobs(self, client_id: str) -> dict[str, str]:
        return _merged(await every(part.open_jobs(client_id) for part in self._parts))

    async def submitted(self, job_ids: Iterable[str]) -> dict[str, GenerateJob]:
        ids = list(job_ids)
        places = by_shard(ids, len(self._parts))
        asked = (self._parts[shard].submitted([ids[place] for place in at]) for shard, at in places.items())
        return _merged(await every(asked))

    async def end_overdue(self, budget: int = 256) -> int:
        return sum(await every(part.end_overdue(budget) for part in self._parts))

    async def states(self, job_ids: Sequence[str]) -> dict[str, str]:
        async def of(part: Broker, ids: Sequence[str]) -> list[str]:
            found = await part.states(ids)
            return [found[job_id] for job_id in ids]

        return dict(zip(job_ids, await self._routed(job_ids, of), strict=True))

    async def read_pieces(
        self, asked: Sequence[tuple[str, Mapping[int, int]]]
    ) -> list[dict[int, list[bytes]] | Exception]:
        wanted = dict(asked)
        return await self._routed(list(wanted), lambda part, ids: part.read_pieces([(it, wanted[it]) for it in ids]))

    async def count_replies(self, client_id: str) -> int:
        return sum(await every(part.count_replies(client_id) for part in self._parts))

    async def unread(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for found in await every(part.unread() for part in self._parts):
            for client, nbytes in found.items():
                total[client] = total.get(client, 0) + nbytes
        return total

    async def drop_replies(self, client_id: str) -> int:
        return sum(await every(part.drop_replies(client_id) for part in self._parts))

    async def waiting(self) -> list[Waiting]:
        return total_of(await every(part.waiting() for part in self._parts))

    async def load(self) -> PoolLoad:
        return sum_of(await every(part.load() for part in self._parts))

    def _in_one_shard(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a reply stream is in one shard: ask each of `parts`")

    own_replies = read_replies = read_news = ack = look_around = _in_one_shard

    async def _routed(self, job_ids: Sequence[str], ask: Callable[[Broker, list[str]], Awaitable[list[T]]]) -> list[T]:
        """An answer for each job, from its shard."""
        return await routed(job_ids, self._parts, lambda part, at: ask(part, [job_ids[place] for place in at]))


def sum_of(loads: Sequence[PoolLoad]) -> PoolLoad:
    """What all shards have together."""
    counts = {it.name: sum(getattr(load, it.name) for load in loads) for it in fields(PoolLoad) if it.name != "queued"}
    return PoolLoad(queued=tuple(map(sum, zip(*(load.queued for load in loads), strict=True))), **counts)


async def every(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The answers to all calls, which run at the same time. If some fail, raises the first error when all are over."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    found: list[T] = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        found.append(answer)
    return found


async def routed(
    job_ids: Sequence[str], parts: Sequence[P], ask: Callable[[P, list[int]], Awaitable[list[T]]]
) -> list[T]:
    """An answer for each job, in order. ask: given a shard's part and the places of its jobs. See `every`."""
    places = by_shard(job_ids, len(parts))
    asked = (ask(parts[shard], at) for shard, at in places.items())
    answers: dict[int, T] = {}
    for at, found in zip(places.values(), await every(asked), strict=True):
        answers.update(zip(at, found, strict=True))
    return [answers[place] for place in range(len(job_ids))]


def by_shard(job_ids: Sequence[str], shards: int) -> dict[int, list[int]]:
    """Shard -> the places of its jobs."""
    places: dict[int, list[int]] = {}
    for place, job_id in enumerate(job_ids):
        places.setdefault(shard_of(job_id, shards), []).append(place)
    return places


def _merged(found: Iterable[Mapping[str, T]]) -> dict[str, T]:
    return {name: value for one in found for name, value in one.items()}
