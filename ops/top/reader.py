"""One look at a pool: what `rolloutmq status` has, and the jobs that the open view shows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from ...messages.broker import Broker, read_jobs
from ...messages.ids import is_id
from ...messages.redis import PoolRedis, is_wrong_type, text, whole
from ..journal import Live, live_of
from ..status import read_state

MOST_JOBS = 1000
"""A list of jobs ends there, about: nobody scrolls further, and Redis answers at once."""
FIELDS = ("state", "client", "accepted", "samples", "published", "attempt", "lost", "group")
STATES = {"q": "queued", "r": "running"}


@dataclass(frozen=True, slots=True)
class Focus:
    """What the open view needs beyond the pool's state.

    worker: whose jobs are listed; "" for the queue's, None for no list. first, rows: the part of it on the screen.
    job: the open one.
    """

    worker: str | None = None
    first: int = 0
    rows: int = 0
    job: str | None = None


@dataclass(frozen=True, slots=True)
class JobLine:
    """What a list says of a job. state: "gone" without a record. age_s: since it was accepted. done: samples published.
    lost: times that a worker died with it.
    """

    id: str
    state: str
    client: str
    age_s: float
    samples: int
    done: int
    attempt: int
    lost: int
    group: str


@dataclass(frozen=True, slots=True)
class Look:
    """at: time.monotonic() when it was made. state: see `read_state`. unread_clients: clients with results that wait.

    focus: what it was made for. job_ids: the list that this asks for. jobs: those on the screen. job: the open one,
    None if it is gone.
    """

    at: float
    state: dict[str, Any]
    focus: Focus = Focus()
    unread_clients: int = 0
    job_ids: list[str] = field(default_factory=list)
    jobs: dict[str, JobLine] = field(default_factory=dict)
    job: Live | None = None

    def worker(self, worker_id: str) -> dict[str, Any] | None:
        """A worker's status, or None if it is gone."""
        return next((it for it in self.state["workers"] if it["worker_id"] == worker_id), None)


class Reader:
    """Looks at one pool, over one connection."""

    def __init__(self, redis: PoolRedis, pool: str) -> None:
        self._redis: Any = redis
        self._broker = Broker(redis, pool)
        self._keys = self._broker.keys

    async def look(self, focus: Focus) -> Look:
        """Raises RedisError."""
        state = await read_state(self._broker)
        state["workers"].sort(key=lambda it: it["worker_id"])
        unread = int(await self._redis.hlen(self._keys.unread))
        job_ids = await self._job_ids(focus.worker) if focus.worker is not None else []
        jobs = await self._jobs(job_ids[focus.first : focus.first + focus.rows])
        job = await live_of(self._broker, focus.job) if focus.job is not None else None
        return Look(time.monotonic(), state, focus, unread, job_ids, jobs, job)

    async def _job_ids(self, worker: str) -> list[str]:
        """Ids of the jobs that a worker holds, or of those in the queue, next first."""
        if worker:
            _, members = await self._redis.sscan(self._keys.held(worker), count=MOST_JOBS)
            found = sorted(members)
        else:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.lrange(self._keys.suspects, 0, MOST_JOBS - 1)
                for queue in (*self._keys.queues, *self._keys.later):
                    pipe.zrange(queue, 0, MOST_JOBS - 1)
                found = [job.rpartition(b":")[2] for part in await pipe.execute() for job in part]
        return list(dict.fromkeys(filter(is_id, map(text, found))))[:MOST_JOBS]

    async def _jobs(self, job_ids: Sequence[str]) -> dict[str, JobLine]:
        if not job_ids:
            return {}
        found = await read_jobs(self._redis, self._keys, job_ids, *FIELDS)
        try:
            clock = whole(await self._redis.hget(self._keys.clock, "at"))
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            clock = 0
        return {job_id: _line(job_id, its, clock) for job_id, its in zip(job_ids, found, strict=True)}


def _line(job_id: str, has: Mapping[str, bytes], clock_ms: int) -> JobLine:
    def words(name: str) -> str:
        return text(has.get(name, b""))

    def count(name: str) -> int:
        return whole(has.get(name))

    return JobLine(
        id=job_id,
        state=STATES.get(words("state"), words("state")) or "gone",
        client=words("client"),
        age_s=max(0, clock_ms - count("accepted")) / 1000 if "accepted" in has else 0.0,
        samples=count("samples"),
        done=count("published"),
        attempt=count("attempt"),
        lost=count("lost"),
        group=words("group"),
    )
