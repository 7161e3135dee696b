"""The worker's side of a pool: its lease, and everything it does with jobs under that lease."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from ..codec import Result, encode
from ..errors import LeaseLost
from ..model import Partial, WorkerStatus
from ..redis import JOB, PROGRESS, Keys, name_once, shard_of, text, whole
from ..scripts import Scripts, calls
from .clock import Witness
from .records import read_jobs

REAPED = 128
"""One call of `reap` is about at most so many jobs and workers."""
REAPS = 256
MAX_CALL_BYTES = 2 << 20
"""Most bytes of one call of complete, checkpoint or release, unless one entry has more. Callers send batches."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed job. It is still encoded, so a payload that cannot be decoded harms no other job of the claim.

    attempt: the fencing token. n: number of samples. queued_s: seconds it waited in the queue. left_s: seconds to its
    deadline, None without one. published: samples that were published before. partials: for each sample to be
    continued, its encoded pieces in order. ending: publish what there is and generate no more, see Broker.stop.
    lost, moves: how often it was lost and moved before. preferred: it named a worker that it prefers.
    """

    job_id: str
    attempt: int
    n: int
    queued_s: float
    left_s: float | None
    payload: bytes
    published: frozenset[int] = frozenset()
    partials: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    ending: bool = False
    lost: int = 0
    moves: int = 0
    preferred: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat's answer. held: jobs that Redis has under this worker's name. committed: newest committed version.
    epoch: the open transfer, 0 for none. reaps: whether this worker is to `reap` now; of a crowd a few are enough.
    workers: how many hold a lease."""

    held: int
    committed: int
    epoch: int
    reaps: bool = True
    workers: int = 1


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample ready to be published. Raises InvalidField if its result is larger than a message may be."""

    job_id: str
    attempt: int
    sample: int
    result: Result
    payload: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Encoded here, where a sample fails alone, and not in a batch with others.
        object.__setattr__(self, "payload", encode(self.result))


@dataclass(frozen=True, slots=True)
class Piece:
    """What a sample has generated since it was last saved. number: 0 for the first piece. Saving 0 again starts over.

    streamed: tell the client. Raises InvalidField if it is larger than a message may be.
    """

    job_id: str
    attempt: int
    sample: int
    number: int
    partial: Partial
    streamed: bool = False
    payload: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "payload", encode(self.partial))  # as in Finished


@dataclass(frozen=True, slots=True)
class Release:
    """A job to be given back. lost: it was in an engine that died. That counts like a lost lease."""

    job_id: str
    attempt: int
    pieces: tuple[Piece, ...] = ()
    lost: bool = False


class Lease:
    """One incarnation of a worker. It ends with LeaseLost: the worker joins again under a new id."""

    def __init__(
        self,
        redis: Redis,
        pool: str,
        worker_id: str,
        lease_s: float = 10.0,
        witness: Witness | None = None,
        *,
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        """witness: of the process' earlier leases in the same pool. shard: the one of a pool with so many `shards` that
        this is a lease in; see also `ShardedLease`."""
        # redis-py types a reply as the union of what every mode and protocol could give; ours are RESP2 and bytes.
        self.redis: Any = redis
        self.keys = Keys(pool, shard)
        self.worker_id = worker_id
        self.lease_s = lease_s
        self._scripts = Scripts(redis, self.keys)
        self.can = ""
        """What the worker's engine can do, see `can_of`; "" for one that gets every job. Set before it joins."""
        self.holds: Callable[[], int] | None = None
        """Samples that the worker holds under this lease. None: a claim takes all it has room for."""
        self.pace: Callable[[], float] = float
        """How fast the engine is, in a unit that all engines of the pool share; 0 if that is not known."""
        self.engine = ""
        """A hex digest of what kind of engine it is: those of one kind count as equally fast."""
        self.again_s, self.share = 0.0, math.inf
        """What the last claim said: seconds after which to claim again in any case, 0 for none, and the samples that
        are the worker's share."""
        self.claimed_at = -math.inf
        self._denied = 0
        self._claims = 0
        self._shards = shards
        self.in_doubt = False
        """Whether its shard did not answer, or the lease in it is lost, since the last heartbeat that got through."""
        self._witness = witness or Witness()

    @property
    def has_share(self) -> bool:
        """Whether the last claim left work to other workers."""
        return self.again_s > 0 and self.share < math.inf

    @property
    def parts(self) -> tuple[Lease, ...]:
        """The worker's leases in all shards of the pool."""
        return (self,)

    def begin_with(self, part: Lease) -> None:
        """Claim from this shard next: whoever took its wake-up token has to look there."""

    def has(self, job_id: str) -> bool:
        """Whether this is the lease in the shard that has this job."""
        return self._shards == 1 or shard_of(job_id, self._shards) == self.keys.shard

    async def learn(self, committed: int, adapters: Mapping[str, int]) -> None:
        """Tell this shard of a committed version and of adapters that the home of the pool has. The home knows them."""
        if self.keys.shard:
            await self._scripts.run(calls.learn(committed, *adapters.items()))

    async def join(self, status: WorkerStatus) -> Beat:
        """Register. From then on the worker may claim. Each beat renews the lease for `lease_s` seconds."""
        return await self._beat(status, join=True)

    async def heartbeat(self, status: WorkerStatus) -> Beat:
        """Renew the lease. The cost does not depend on how much is held. Raises LeaseLost if others have the jobs."""
        return await self._beat(status, join=False)

    async def _beat(self, status: WorkerStatus, join: bool) -> Beat:
        lease_ms, asked_at, witnessed = round(self.lease_s * 1000), self._witness.now(), self._witness.says()
        call = calls.heartbeat(self.worker_id, lease_ms, encode(status), int(join), *witnessed, self.can)
        answer = await self._scripts.run(call)
        if answer[0] == b"FENCED":
            raise LeaseLost(f"worker {self.worker_id} was not heard of for {self.lease_s} s")
        held, committed, epoch, clock, reaps, workers = answer[1:]
        self._witness.hears(clock, asked_at)
        return Beat(held, committed, epoch, bool(reaps), workers)

    async def claim(
        self, max_jobs: int, max_samples: int, version: int, adapters: Mapping[str, int] | None = None, carried: int = 0
    ) -> list[Claim]:
        """Take queued jobs, highest class first, of about `max_samples` samples together. The last job may go over.

        With `holds` a claim fills the worker up to its fair share of what waits. It may then say that it is to be
        repeated (`again_s`): what others have not taken by then is shared again. A claim of 0 samples says that it
        takes none now.
        carried: samples beyond its shares that it has in other shards.

        Gives jobs that can run on weights `version` with these adapters, and jobs for adapters that the pool does not
        have at all. Jobs that another worker's engine can do and this one's cannot (`can`) wait for that one. If the
        reply to a claim was lost, the next call returns the same jobs. Raises LeaseLost.
        """
        number = self._claims + 1
        has = (adapters or {}).items()
        holds = "" if self.holds is None else max(0, self.holds() + carried)
        limits = max_jobs, max_samples, version, self.can, holds
        pace = f"{self.pace():.4g}/{self.engine}"
        answer = await self._scripts.run(calls.claim(self.worker_id, number, *limits, pace, self._denied, *has))
        if answer[0] == b"NOLEASE":
            raise LeaseLost(f"worker {self.worker_id} holds no lease")
        self._claims = number
        again_ms, share, *jobs = answer
        self.again_s, self.share = again_ms / 1000, math.inf if share < 0 else share / 1000
        self.claimed_at = time.monotonic()
        self._denied = self._denied + 1 if again_ms and share >= 0 and not jobs else 0
        return [_claim(jobs[i : i + 7]) for i in range(0, len(jobs), 7)]

    async def complete(self, finished: Sequence[Finished]) -> list[str]:
        """Publish samples. Returns for each "ok", "again" (published before) or "fenced" (another has the job)."""
        samples = ((it.job_id, it.attempt, it.sample, it.payload) for it in finished)
        return [state.decode() for state in await self._scripts.run(calls.complete(self.worker_id, *samples))]

    async def checkpoint(self, pieces: Sequence[Piece]) -> list[str]:
        """Save what unfinished samples have generated. Returns for each piece "ok", "fenced", "gap" or "full".

        A repeated piece is harmless. "gap": an earlier piece is missing and this one was not kept. Begin with 0 again.
        "full": the pool has no room for it, and it was not kept. It may be sent again, also as a part of a longer one.
        """
        saved = ((it.job_id, it.attempt, it.sample, it.number, it.payload, 1 if it.streamed else "") for it in pieces)
        return [state.decode() for state in await self._scripts.run(calls.checkpoint(self.worker_id, *saved))]

    async def release(self, jobs: Sequence[Release], max_lost: int, to: str = "") -> list[str]:
        """Give unfinished jobs back. Returns for each "ok", "dead" (lost once too often) or "fenced".

        to: a worker that takes them over. It alone gets them for a second, then anybody; this is a move, which counts
        as no loss and no redelivery. A job is "kept", and still this worker's, if that worker is not there, not all
        pieces found room, or the job was lost before.
        """
        given: list[tuple[calls.Arg, ...]] = []
        for job in jobs:
            given.append((job.job_id, job.attempt, int(job.lost), len(job.pieces)))
            given += [(piece.sample, piece.number, piece.payload) for piece in job.pieces]
        call = calls.release(self.worker_id, max_lost, to, *given)
        return [state.decode() for state in await self._scripts.run(call)]

    async def bury(self, job_id: str, attempt: int, cause: str, host: str, error: str) -> bool:
        """Dead-letter a job. False if it is not this worker's any more."""
        answer: bytes = await self._scripts.run(calls.dead(self.worker_id, job_id, attempt, cause, host, error[:2000]))
        return answer == b"ok"

    async def expire(self, job_id: str, attempt: int) -> bool:
        """End a running job whose deadline passed. False if it is not this worker's any more."""
        answer: bytes = await self._scripts.run(calls.expire(self.worker_id, job_id, attempt))
        return answer == b"ok"

    async def leave(self) -> int:
        """Unregister. Returns how many jobs the worker still holds. At 0 it is gone."""
        return int(await self._scripts.run(calls.leave(self.worker_id)))

    async def reap(self, max_lost: int, budget: int = REAPED, most_calls: int = REAPS) -> tuple[int, int, int, int]:
        """Take back the jobs of all dead workers. Returns (requeued, dead-lettered, expired, workers removed).

        One call of Redis is about at most `budget` jobs and workers, so that Redis is never busy for long. Calls
        follow each other until nothing is left to do, at most `most_calls`.
        """
        totals = [0, 0, 0, 0]
        for _ in range(most_calls):
            *counts, more = await self._scripts.run(calls.reap(max_lost, budget, *self._witness.says()))
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
            if not more:
                break
        return totals[0], totals[1], totals[2], totals[3]

    async def attempts(self, job_ids: Sequence[str]) -> dict[str, int]:
        """The current attempt of each job, 0 for a job that Redis does not have."""
        found = await read_jobs(self.redis, self.keys, job_ids, "attempt")
        return {job_id: whole(its.get("attempt")) for job_id, its in zip(job_ids, found, strict=True)}

    async def held(self) -> frozenset[str]:
        """Ids of the jobs Redis has under this worker's name."""
        return frozenset(text(job) for job in await self.redis.smembers(self.keys.held(self.worker_id)))


def _claim(raw: list[Any]) -> Claim:
    job_id, attempt, n, queued_ms, left_ms, payload, progress = raw
    published: set[int] = set()
    pieces: dict[int, dict[int, bytes]] = {}
    said: dict[str, bytes] = {}
    for name, content in zip(map(text, progress[::2]), progress[1::2], strict=True):
        if name in (JOB.ending, JOB.lost, JOB.moves, JOB.prefers):
            said[name] = content
        elif (found := PROGRESS.fullmatch(name)) is None:
            name_once(f"job {text(job_id)}: field {name[:80]!r}: it is left out")
        elif found[1] == JOB.sample:
            published.add(int(found[2]))
        else:
            pieces.setdefault(int(found[2]), {})[int(found[3] or 0)] = content
    return Claim(
        job_id=job_id.decode(),
        attempt=int(attempt),
        n=int(n),
        queued_s=int(queued_ms) / 1000,
        left_s=int(left_ms) / 1000 if left_ms != b"" else None,
        payload=payload,
        published=frozenset(published),
        ending=JOB.ending in said,
        lost=whole(said.get(JOB.lost)),
        moves=whole(said.get(JOB.moves)),
        preferred=JOB.prefers in said,
        partials={
            sample: tuple(numbered[number] for number in sorted(numbered))
            for sample, numbered in pieces.items()
            if sample not in published
        },
    )
