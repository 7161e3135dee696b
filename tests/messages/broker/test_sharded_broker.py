"""The broker and the leases of a pool with several shards: where jobs go, what a full or silent shard means."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError
from support.pools.pool import replies, status
from support.specimens.messages import job, result

from rolloutmq.messages import Caps, Finished, PoolBusy, Release, connect
from rolloutmq.messages.broker import AWAY, Broker, Lease, Piece, ShardedLease, broker_of
from rolloutmq.messages.model import Partial
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.messages.redis import ping, shard_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.sync.transfer.ledger import Ledger

pytestmark = pytest.mark.one_shard
SHARDS = 4


@pytest.fixture(scope="module")
def second() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def wide(redis_db: str, second: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A pool with four shards on two servers."""
    async with Redis.from_url(second.url) as client:
        await client.flushall()
    async with connect(f"{redis_db},{second.url}?shards={SHARDS}", pool="default") as client:
        await ping(client)
        yield client


async def lease_in(wide: Redis, worker_id: str = "w1") -> ShardedLease:
    parts = [
        Lease(one, "default", worker_id, shard=shard, shards=SHARDS)
        for shard, one in enumerate(wide.shards)  # type: ignore[attr-defined]
    ]
    for part in parts:
        await part.join(status(worker_id))
    return ShardedLease(parts)


def one_for(shard: int) -> object:
    """A job of this shard."""
    return next(one for one in iter(job, None) if shard_of(one.id, SHARDS) == shard)


async def test_each_job_is_in_its_shard_and_answers_come_in_order(wide: Redis) -> None:
    broker = broker_of(wide, "default")
    jobs = [job(n=2) for _ in range(40)]
    assert await broker.enqueue(jobs) == ["new"] * 40
    assert await broker.enqueue(jobs[7:9]) == ["q", "q"], "a job that is sent again meets its record"
    for part in broker.parts:
        mine = {one.id for one in jobs if shard_of(one.id, SHARDS) == part.keys.shard}
        assert mine
        assert set(await part.open_jobs("client")) == mine
    assert (await broker.load()).open_jobs == len(await broker.open_jobs("client")) == 40
    assert await broker.cancel([jobs[3].id, "0" * 32, jobs[1].id]) == ["ok", "unknown", "ok"]
    states = await broker.states([one.id for one in jobs[:4]])
    assert list(states.items()) == [(one.id, state) for one, state in zip(jobs, ["q", "cancelled"] * 2, strict=False)]
    assert await broker.cancel_client("client") == 38
    assert await broker.count_replies("client") == len(await replies(broker)) == 40


async def test_one_worker_takes_from_all_shards_and_publishes_into_each(wide: Redis) -> None:
    broker, lease = broker_of(wide, "default"), await lease_in(wide)
    jobs = [job() for _ in range(40)]
    await broker.enqueue(jobs)
    claims = []
    for _ in range(SHARDS):
        claims += await lease.claim(100, 100, 0)
    assert {claim.job_id for claim in claims} == {one.id for one in jobs}
    assert await lease.claim(100, 100, 0) == []
    by_id = {one.id: one for one in jobs}
    given, kept = claims[:5], claims[5:]
    assert await lease.release([Release(one.job_id, one.attempt) for one in given], 3) == ["ok"] * 5
    done = [Finished(one.job_id, one.attempt, 0, result(by_id[one.job_id])) for one in kept]
    assert await lease.complete(done) == ["ok"] * 35
    assert await lease.complete(done[::-1]) == ["again"] * 35
    assert {reply.outcome.job_id for reply in await replies(broker)} == {one.job_id for one in kept}
    assert await lease.leave() == 0


async def test_no_shard_starves(wide: Redis) -> None:
    broker, lease = broker_of(wide, "default"), await lease_in(wide)
    await broker.enqueue([job() for _ in range(200)])
    seen = [shard_of((await lease.claim(1, 1, 0))[0].job_id, SHARDS) for _ in range(3 * SHARDS)]
    assert sorted(seen) == sorted([*range(SHARDS)] * 3)


async def test_a_full_shard_says_which_jobs_are_in(wide: Redis) -> None:
    broker = broker_of(wide, "default", Caps(jobs=SHARDS))  # one in each
    jobs = [one_for(shard) for shard in (0, 1, 1, 2, 1, 3)]
    with pytest.raises(PoolBusy) as busy:
        await broker.enqueue(jobs)  # type: ignore[arg-type]
    assert (busy.value.accepted, busy.value.states, busy.value.beyond) == (2, ["new", "new"], {3, 5})
    assert (await broker.load()).open_jobs == 4


async def test_a_silent_shard_stops_no_other(wide: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    broker, lease = broker_of(wide, "default"), await lease_in(wide)
    await broker.enqueue([job() for _ in range(40)])

    async def silent(*_: object) -> None:
        raise ConnectionError("gone")

    for name in ("claim", "checkpoint"):
        monkeypatch.setattr(lease.parts[2], name, silent)
    claims = [claim for _ in range(SHARDS) for claim in await lease.claim(100, 100, 0)]
    assert {shard_of(one.job_id, SHARDS) for one in claims} == {0, 1, 3}
    assert lease.parts[2].in_doubt
    monkeypatch.undo()
    assert await lease.claim(100, 100, 0) == [], "until a heartbeat gets through"
    lease.parts[2].in_doubt = False
    assert {shard_of(one.job_id, SHARDS) for one in await lease.claim(100, 100, 0)} == {2}


async def test_data_in_the_way_of_a_checkpoint_is_no_silent_shard(wide: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever saves sends each piece alone then (`each` in worker/lease/batches.py)."""
    lease = await lease_in(wide)

    async def broken(*_: object) -> list[str]:
        raise ResponseError("user_script:1: no such thing")

    monkeypatch.setattr(lease.parts[2], "checkpoint", broken)
    partial = Partial(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), segments=((0, 1),))
    pieces = [Piece(one_for(shard).id, 1, 0, 0, partial) for shard in (1, 2)]  # type: ignore[attr-defined]
    with pytest.raises(ResponseError, match="no such thing"):
        await lease.checkpoint(pieces)


async def committed_in(part: Broker) -> bytes | None:
    return await part.redis.hget(part.keys.weights, "committed")


async def test_all_shards_hear_what_is_committed(wide: Redis) -> None:
    ledger, broker = Ledger(wide, "default"), broker_of(wide, "default")
    announcement = WeightAnnouncement(
        version=3, epoch=1, host="127.0.0.1", port=1, join_timeout_s=1.0, transfer_timeout_s=1.0
    )
    await ledger.announce(announcement)
    await ledger.close(announcement, True, None, {})
    assert [await committed_in(part) for part in broker.parts] == [b"3"] * SHARDS
    lease = await lease_in(wide)
    await lease.learn(2, {"a": 5})
    assert [await committed_in(part) for part in broker.parts] == [b"3"] * SHARDS, "it never goes back"
    known = [await part.redis.hget(part.keys.weights, "number:a") for part in broker.parts]
    assert known == [None, b"1", b"1", b"1"], "the home numbers adapters itself"
    assert AWAY not in {"ok", "gap", "full", "fenced"}
