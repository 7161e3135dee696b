"""One reading of a pool out of Redis: what is there, what waits and for what, and who could run it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from ...messages.broker import Broker, PoolLoad, Waiting, read_jobs, sum_of, total_of
from ...messages.errors import RedisRefused
from ...messages.ids import age_s
from ...messages.model import WorkerStatus
from ...messages.redis import ADAPTERS_FROM, ONCE_S, SLOTS_FROM, is_wrong_type, text, whole, within
from ...sync.transfer import Ledger

GROUPS = 32
"""Jobs that wait for adapters' versions, or for exactly one version of the weights, that one look counts."""
UNCLAIMED_S = 4.0
"""A claim takes milliseconds. A job that has waited so long beside free slots should have been claimed."""
CONFIRM_S = 1.2
"""Longer than from one heartbeat to the next."""
STARTING_MS = 10_000
"""A worker that starts says so every three seconds."""
BUSY_S = 15.0
"""A pool that refused a job counts as full for so long: whoever waits for room asks twice a second."""


@dataclass(frozen=True, slots=True)
class Held:
    """Jobs that are put aside until something comes. what: an adapter's name, "" for the weights. least: the smallest
    version that one of them needs. by_staleness: whether that one needs it because of its `max_staleness` alone."""

    jobs: int
    least: int
    what: str = ""
    by_staleness: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """The newest submission that the pool refused. why: as PoolBusy.reason. client: whose it was. s: seconds since."""

    why: str
    client: str
    s: float


@dataclass(frozen=True, slots=True)
class PoolReading:
    """A pool at one moment. Times are Unix seconds by Redis' clock.

    shards_away: shard -> why it does not answer; nothing else is said of these. lease_ends: by worker.
    starting: workers that are no worker of the pool yet: since when they start. start_s: how long the last start took
    until the worker was in the pool, 0 if that is not known.
    committed, newest: version of the weights that is the pool's, and the newest that was ever announced. transfer: the
    number of the one under way, 0 for none. offered_by: who says that it offers the committed version; "" for
    the trainer. gateways: names of those that have served somebody and not left.
    ready: jobs that wait in the queues for any worker; heads: the first of each queue; oldest_at: when the oldest of
    these was made, by its id. unclaimed: whether one of them stayed there for a while beside free slots. ahead: jobs
    that wait for weights newer than the committed ones. behind: for those, or older ones. adapters: for an adapter's
    version; adapters_at: the committed version of each. exact: for exactly this version of the weights, how many.
    preferring: for the worker that they prefer. needs: for what
    only some engines can do.
    alone: worker -> the job on its last chance that it runs without others.
    refuses: by shard, why its Redis takes no writes, as far as this user may write; asked where no worker has a lease.
    unreached: shards with jobs where no worker has a lease, though some have one at home. tenants: those that have
    paused at a gateway, and since when.
    refused: None if nobody was refused lately. memory, memory_limit: bytes of the fullest server; 0 if it has no limit,
    or this user may not ask.
    """

    pool: str
    at: float
    load: PoolLoad
    workers: tuple[WorkerStatus, ...] = ()
    lease_ends: Mapping[str, float] = field(default_factory=dict)
    shards_away: Mapping[int, str] = field(default_factory=dict)
    starting: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0
    committed: int = 0
    newest: int = 0
    transfer: int = 0
    offered_by: frozenset[str] = frozenset()
    gateways: frozenset[str] = frozenset()
    ready: int = 0
    heads: frozenset[str] = frozenset()
    oldest_at: float | None = None
    unclaimed: bool = False
    ahead: Held | None = None
    behind: Held | None = None
    adapters: tuple[Held, ...] = ()
    adapters_at: Mapping[str, int] = field(default_factory=dict)
    exact: Mapping[int, int] = field(default_factory=dict)
    preferring: int = 0
    needs: tuple[Waiting, ...] = ()
    alone: Mapping[str, str] = field(default_factory=dict)
    refused: Refused | None = None
    memory: int = 0
    memory_limit: int = 0
    refuses: Mapping[int, str] = field(default_factory=dict)
    unreached: tuple[int, ...] = ()
    tenants: Mapping[str, float] = field(default_factory=dict)

    def parts_there(self, broker: Broker) -> list[Broker]:
        """The brokers of the shards that have answered."""
        return [part for part in broker.parts if part.keys.shard not in self.shards_away]

    @property
    def alive(self) -> list[WorkerStatus]:
        """The workers whose lease has not run out."""
        return [it for it in self.workers if self.lease_ends.get(it.worker_id, 0.0) > self.at]

    @property
    def having(self) -> list[str]:
        """Those of them that have the committed version, or say that they offer it and miss nothing."""
        offer = [it for it in self.alive if it.worker_id in self.offered_by and "unavailable" not in it.blocks]
        return sorted({it.worker_id for it in (*offer, *(it for it in self.alive if it.version >= self.committed))})

    @property
    def free(self) -> list[WorkerStatus]:
        """Those of them that serve, hold less than half of what they could, and run no job alone."""
        serve = [it for it in self.alive if not it.blocks and it.state in {"serving", "updating"}]
        return [it for it in serve if 2 * it.held < it.max_running and it.worker_id not in self.alone]

    @property
    def silent(self) -> dict[str, float]:
        """The others that nobody has removed yet: when their leases ran out."""
        return {worker: ended for worker, ended in self.lease_ends.items() if ended <= self.at}


async def read_pool(broker: Broker) -> PoolReading:
    """Read it. A shard that does not answer is left out, and named.

    Takes a second longer if jobs wait beside free slots: then it reads twice, because they may be claimed just now.
    Raises RedisUnavailable if the home of the pool, which has the list of its workers, does not answer, and
    NoPermissionError.
    """
    reading = await _read_once(broker)
    waited_s = 0.0 if reading.oldest_at is None else reading.at - reading.oldest_at
    if not (reading.ready and reading.free and waited_s >= UNCLAIMED_S):
        return reading
    await asyncio.sleep(CONFIRM_S)
    again = await _read_once(broker)
    return replace(again, unclaimed=bool(again.heads & reading.heads and again.free))


async def _read_once(broker: Broker) -> PoolReading:
    home, *others = broker.parts
    parts, away = [await _read_part(home)], dict[int, str]()
    for other in others:
        try:
            with within(0.0):
                async with asyncio.timeout(ONCE_S):
                    parts.append(await _read_part(other))
        except NoPermissionError:
            raise
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            away[other.keys.shard] = str(error) or f"no answer within {ONCE_S:g} s"
    reading = await _read_home(home, parts, away)
    alone = [await _alone(part, reading.workers) for part in reading.parts_there(broker)]
    empty = [broker.parts[shard] for shard in reading.unreached] if reading.alive else [home]
    refuses = {part.keys.shard: why for part in empty if (why := await _refuses(part))}
    unreached = tuple(shard for shard in reading.unreached if shard not in refuses)
    found = {worker: job for one in alone for worker, job in one.items()}
    return replace(reading, alone=found, refuses=refuses, unreached=unreached)


async def _refuses(part: Broker) -> str:
    """Why it takes no writes. Without any no lease lasts, and the workers seem to be gone."""
    try:
        with within(0.0):
            await part.redis.delete(f"{part.keys.prefix}none")  # which is never there
    except (RedisError, OSError) as error:  # without rights, for one: the rest has been read
        replica = "Redis takes no writes: it is a replica" if "READONLY" in str(error) else ""
        return str(error) if isinstance(error, RedisRefused) else replica
    return ""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one shard says."""

    shard: int
    load: PoolLoad
    leases: list[tuple[bytes, float]]
    needs: list[Waiting]
    now_ms: int
    clock_ms: int  # the pool's, as leases follow it
    ready: int
    heads: frozenset[str]
    waited_s: float | None  # the oldest of these
    ahead: Held | None
    behind: Held | None
    adapters: list[Held]
    exact: Counter[int]
    preferring: int
    refused: Refused | None
    memory: tuple[int, int]

    @property
    def living(self) -> bool:
        """Whether a worker has a lease here."""
        return any(end > self.clock_ms for _, end in self.leases)


async def _read_part(part: Broker) -> _Part:
    redis: Any = part.redis
    keys = part.keys
    load, needs = await part.load(), await part.waiting()
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hget(keys.weights, "committed")
        committed = whole((await _answers(pipe, [None]))[0])
    spans = [(f"(-{ADAPTERS_FROM}", "(0"), (0, committed), (f"({committed}", f"({ADAPTERS_FROM}")]
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.hmget(keys.clock, "at", "seen", "ticked")
        pipe.hget(keys.load, "busy")
        pipe.zrange(keys.workers, 0, -1, withscores=True)
        for queue, later in zip(keys.queues, keys.later, strict=True):
            pipe.zcard(queue)
            pipe.zrange(queue, 0, 0)
            for first, last in spans:
                pipe.zcount(later, first, last)
            for first, last in spans[1:]:
                pipe.zrangebyscore(later, first, last, withscores=True, start=0, num=1)
            pipe.zrangebyscore(later, ADAPTERS_FROM, f"({SLOTS_FROM}", withscores=True, start=0, num=GROUPS)
            pipe.zrangebyscore(later, "-inf", -ADAPTERS_FROM, withscores=True, start=0, num=GROUPS)
        none = [0, [], 0, 0, 0, [], [], [], []] * len(keys.queues)
        (seconds, micros), clock, busy, leases, *rows = await _answers(pipe, [None, [None] * 3, None, [], *none])
    now_ms = seconds * 1000 + micros // 1000
    rows = [rows[i : i + 9] for i in range(0, len(rows), 9)]
    at, *moved = map(whole, clock)
    heads = frozenset(text(row[1][0]) for row in rows if row[1])
    ages = [age for age in (age_s(job, now_ms / 1000) for job in heads) if age is not None]
    return _Part(
        shard=keys.shard,
        load=load,
        leases=leases,
        needs=needs,
        now_ms=now_ms,
        clock_ms=at + max(0, now_ms - max(moved)),
        ready=sum(row[0] for row in rows),
        heads=heads,
        waited_s=max(ages, default=None),
        ahead=await _held(part, [(row[4], row[6]) for row in rows]),
        behind=await _held(part, [(row[3], row[5]) for row in rows]),
        adapters=await _of_adapters(part, [entry for row in rows for entry in row[7]]),
        exact=await _exact(part, {int(score) for row in rows for _, score in row[8]}),
        preferring=sum(row[2] for row in rows),
        refused=_refusal(busy, now_ms),
        memory=await _memory(part.redis),
    )


async def _held(part: Broker, classes: list[tuple[int, list[tuple[bytes, float]]]]) -> Held | None:
    """Jobs that wait for weights. classes: of each priority how many, and the first of them."""
    if not (count := sum(jobs for jobs, _ in classes)):
        return None
    first = min((one for _, firsts in classes for one in firsts), key=lambda it: it[1], default=None)
    bare = first is not None and await _has_no_version(part, text(first[0]))
    return Held(count, int(first[1]) if first else 0, by_staleness=bare)


async def _exact(part: Broker, scores: set[int]) -> Counter[int]:
    """How many jobs wait for exactly one version, by version. scores: where they wait in `later`."""
    places = [(score, later) for score in scores for later in part.keys.later]
    async with part.redis.pipeline(transaction=False) as pipe:
        for score, later in places:
            pipe.zcount(later, score, score)
        counts = await _answers(pipe, [0] * len(places)) if places else []
    found = Counter[int]()
    for (score, _), count in zip(places, counts, strict=True):
        found[-score - ADAPTERS_FROM] += count
    return found


def _refusal(busy: bytes | None, now_ms: int) -> Refused | None:
    said = (busy or b"").split(b" ")
    s = (now_ms - whole(said[0])) / 1000
    return Refused(text(said[1]), text(said[2]), max(0.0, s)) if len(said) == 3 and s < BUSY_S else None


async def _has_no_version(part: Broker, member: str) -> bool:
    (version,) = await _fields(part, [member], "min_version")
    return not whole(version)


async def _of_adapters(part: Broker, entries: list[tuple[bytes, float]]) -> list[Held]:
    said = [text(it).rpartition("@") for it in await _fields(part, [text(member) for member, _ in entries], "adapter")]
    found: dict[str, list[int]] = {}
    for (_, score), (name, _, _) in zip(entries, said, strict=True):
        found.setdefault(name, []).append(int(score) % ADAPTERS_FROM)
    return [Held(len(versions), min(versions), name) for name, versions in found.items() if name]


async def _fields(part: Broker, members: list[str], name: str) -> list[bytes | None]:
    """A field of the records of the jobs in these members of `queues` or `later`."""
    found = await read_jobs(part.redis, part.keys, [member.rpartition(":")[2] for member in members], name)
    return [its.get(name) for its in found]


async def _answers(pipe: Any, instead: Sequence[Any]) -> list[Any]:
    """What a pipeline answers. instead: for each answer, what stands for a key of a wrong type."""
    found = await pipe.execute(raise_on_error=False)
    for place, answer in enumerate(found):
        if isinstance(answer, Exception):
            if not is_wrong_type(answer):
                raise answer
            found[place] = instead[place]
    return list(found)


async def _memory(redis: Any) -> tuple[int, int]:
    try:
        said = await redis.info("memory")
    except RedisError:  # a user without +info
        return 0, 0
    used, limit = said.get("used_memory"), said.get("maxmemory")
    return used if isinstance(used, int) else 0, limit if isinstance(limit, int) else 0


async def _read_home(home: Broker, parts: list[_Part], away: dict[int, str]) -> PoolReading:
    redis: Any = home.redis
    workers, (first, *_) = await home.workers(), parts
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hgetall(home.keys.weights)
        pipe.hgetall(home.keys.holders)
        pipe.hgetall(home.keys.starting)
        pipe.hgetall(home.keys.gateways)
        pipe.hgetall(home.keys.paused)
        weights, holders, starts, gateways, paused = await _answers(pipe, [{}] * 5)
    weights = {text(name): value for name, value in weights.items()}
    committed = whole(weights.get("committed"))
    at = first.now_ms / 1000
    oldest = [at - it.waited_s for it in parts if it.waited_s is not None]
    return PoolReading(
        pool=home.keys.pool,
        at=at,
        load=sum_of([it.load for it in parts]),
        workers=tuple(workers),
        lease_ends={text(worker): at + (end - first.clock_ms) / 1000 for worker, end in first.leases},
        shards_away=away,
        unreached=tuple(it.shard for it in parts if it.load.open_jobs and not it.living) if first.living else (),
        tenants={
            text(name): float(whole(since)) for name, since in paused.items() if since != b"1"
        },  # an older gateway's
        starting=dict(_starting(starts, first.now_ms)),
        start_s=whole(starts.get(b"")) / 1000,
        committed=committed,
        newest=max(committed, whole(weights.get("highest"))),
        transfer=whole(weights.get("open")),
        offered_by=frozenset(text(name) for name in Ledger.offering(holders, committed)),
        gateways=frozenset(text(client).rpartition("/")[2] for client, heir in gateways.items() if not heir),
        ready=sum(it.ready for it in parts),
        heads=frozenset().union(*(it.heads for it in parts)),
        oldest_at=min(oldest, default=None),
        ahead=_together([it.ahead for it in parts if it.ahead is not None]),
        behind=_together([it.behind for it in parts if it.behind is not None]),
        adapters=tuple(one for it in parts for one in it.adapters),
        adapters_at={name[8:]: whole(at) for name, at in weights.items() if name.startswith("adapter:")},
        exact=sum((it.exact for it in parts), Counter()),
        preferring=sum(it.preferring for it in parts),
        needs=tuple(total_of([it.needs for it in parts])),
        refused=min((it.refused for it in parts if it.refused is not None), key=lambda one: one.s, default=None),
        memory=max(it.memory for it in parts)[0],
        memory_limit=max(it.memory for it in parts)[1],
    )


def _starting(starts: Mapping[bytes, bytes], now_ms: int) -> Iterator[tuple[str, float]]:
    for name, said in starts.items():
        began, _, last = said.partition(b" ")
        if name and now_ms - whole(last) < STARTING_MS:
            yield text(name), whole(began) / 1000


def _together(shards: list[Held]) -> Held | None:
    if not shards:
        return None
    least = min(shards, key=lambda one: one.least)
    return Held(sum(one.jobs for one in shards), least.least, by_staleness=least.by_staleness)


async def _alone(part: Broker, workers: Sequence[WorkerStatus]) -> dict[str, str]:
    """Worker -> the job that it runs alone, if it still does."""
    redis: Any = part.redis
    async with redis.pipeline(transaction=False) as pipe:
        for worker in workers:
            pipe.hget(part.keys.worker(worker.worker_id), "alone")
        found = zip(workers, await _answers(pipe, [None] * len(workers)), strict=True)
        jobs = {it.worker_id: text(job) for it, job in found if job}
        for name, job in jobs.items():
            pipe.sismember(part.keys.held(name), job)
        still = await _answers(pipe, [0] * len(jobs)) if jobs else []
    return {worker: job for (worker, job), holds in zip(jobs.items(), still, strict=True) if holds}
