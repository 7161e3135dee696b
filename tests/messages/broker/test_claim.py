"""Who gets which jobs: order, classes, versions, deadlines, and only under a lease."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, eventually, replies, status
from support.specimens.messages import job, result

from rolloutmq.messages import Broker, Claim, Finished, GenerateJob, Lease, LeaseLost, Release, decode
from rolloutmq.messages.model.weights import WeightAnnouncement
from rolloutmq.sync.transfer.ledger import Ledger


async def commit(db: Redis, version: int) -> None:
    ledger = Ledger(db, "default")
    announcement = WeightAnnouncement(
        version=version,
        epoch=await ledger.new_epoch(),
        host="127.0.0.1",
        port=1,
        join_timeout_s=1.0,
        transfer_timeout_s=1.0,
    )
    await ledger.announce(announcement)
    await ledger.close(announcement, True, None, {})


async def test_first_come_first_served_within_a_class(broker: Broker, joined) -> None:
    jobs = [job() for _ in range(5)]
    await broker.enqueue(jobs)
    lease = await joined()
    claims = await lease.claim(3, 100, 0) + await lease.claim(3, 100, 0)
    assert [claim.job_id for claim in claims] == [one.id for one in jobs]
    assert [decode(claim.payload, GenerateJob) for claim in claims] == jobs
    assert {claim.attempt for claim in claims} == {1}
    assert await lease.held() == {one.id for one in jobs}


async def test_higher_classes_first(broker: Broker, joined) -> None:
    low, normal, high = (job(priority=p) for p in ("low", "normal", "high"))
    await broker.enqueue([low, normal, high])
    assert (await broker.load()).queued == (1, 1, 1)
    claims = await (await joined()).claim(3, 100, 0)
    assert [claim.job_id for claim in claims] == [high.id, normal.id, low.id]


async def test_samples_already_out_do_not_count(broker: Broker, joined) -> None:
    one = job(n=4)
    await broker.enqueue([one])
    first = await joined("w1")
    await first.claim(1, 9, 0)
    await first.complete([Finished(one.id, 1, i, result(one, i)) for i in (0, 2)])
    await first.release([Release(one.id, 1)], 3)
    await broker.enqueue([job(), job(), job()])
    claims = await (await joined("w2")).claim(9, 3, 0)
    assert len(claims) == 2
    assert claims[0].published == {0, 2}


async def test_a_repeated_claim_gets_the_same_jobs(broker: Broker, db: Redis, joined) -> None:
    jobs = [job() for _ in range(4)]
    await broker.enqueue(jobs)
    lease = await joined()
    first = await lease.claim(2, 100, 0)
    lease._claims -= 1  # its reply was lost
    again = await lease.claim(2, 100, 0)
    assert [(c.job_id, c.attempt, c.payload) for c in again] == [(c.job_id, c.attempt, c.payload) for c in first]
    # what was finished in between is not given again
    await lease.complete([Finished(jobs[0].id, 1, 0, result(jobs[0]))])
    lease._claims -= 1
    assert [claim.job_id for claim in await lease.claim(2, 100, 0)] == [jobs[1].id]
    assert [claim.job_id for claim in await lease.claim(9, 100, 0)] == [one.id for one in jobs[2:]]


async def test_no_claim_without_a_lease(broker: Broker, db: Redis, joined, expire_lease) -> None:
    await broker.enqueue([job()])
    before = await dump(db)
    with pytest.raises(LeaseLost, match="nobody"):
        await Lease(db, "default", "nobody").claim(1, 1, 0)
    assert await dump(db) == before
    lease = await joined()
    await expire_lease(lease)
    with pytest.raises(LeaseLost):
        await lease.claim(1, 1, 0)
    assert (await broker.load()).queued == (0, 1, 0)
    # nobody has taken it back yet: a heartbeat renews it
    await lease.heartbeat(status("w1"))
    assert len(await lease.claim(1, 1, 0)) == 1


async def test_a_heartbeat_after_the_lease_was_taken_back_is_fenced(broker: Broker, joined, expire_lease) -> None:
    lease, other = await joined("w1"), await joined("w2")
    assert (await lease.heartbeat(status("w1"))).held == 0
    await expire_lease(lease)
    assert await other.reap(3) == (0, 0, 0, 1)
    with pytest.raises(LeaseLost, match="w1"):
        await lease.heartbeat(status("w1"))
    assert [worker.worker_id for worker in await broker.workers()] == ["w2"]


async def test_min_version_waits_for_the_weights(broker: Broker, joined) -> None:
    new, old = job(min_version=3), job()
    await broker.enqueue([new, old])
    lease = await joined()
    assert [claim.job_id for claim in await lease.claim(9, 9, 2)] == [old.id]
    later = job()
    await broker.enqueue([later])
    assert [claim.job_id for claim in await lease.claim(9, 9, 3)] == [new.id, later.id]  # it kept its place


async def test_max_staleness_is_against_the_newest_committed(broker: Broker, db: Redis, joined) -> None:
    one = job(max_staleness=1)
    await broker.enqueue([one])
    await commit(db, 5)
    lease = await joined()
    assert await lease.claim(1, 1, 3) == []
    assert len(await lease.claim(1, 1, 4)) == 1


async def test_a_deadline_that_passed_in_the_queue(broker: Broker, joined) -> None:
    late, fine = job(deadline_s=0.001), job(deadline_s=60.0)
    await broker.enqueue([late, fine])
    lease = await joined()

    async def claim_one() -> list[str]:
        return [claim.job_id for claim in await lease.claim(1, 1, 0)]

    await eventually(lambda: _passed(broker, late))
    assert await claim_one() == [fine.id]
    (reply,) = await replies(broker)
    assert (reply.outcome.job_id, reply.outcome.outcome) == (late.id, "expired")
    assert "in the queue" in reply.outcome.cause
    load = await broker.load()
    assert (load.open_jobs, load.expired) == (1, 1)


async def _passed(broker: Broker, one: GenerateJob) -> bool:
    seconds, micros = await broker.redis.time()
    deadline = await broker.redis.zscore(broker.keys.deadlines, one.id)
    return deadline is None or seconds * 1000 + micros // 1000 > deadline  # as scripts read the clock


async def test_a_claim_says_what_is_left_of_the_deadline(broker: Broker, joined) -> None:
    await broker.enqueue([job(deadline_s=60.0), job()])
    first, second = await (await joined()).claim(2, 2, 0)
    assert first.left_s is not None
    assert first.queued_s >= 0
    assert first.left_s + first.queued_s == pytest.approx(60.0, abs=0.002)
    assert second.left_s is None


async def test_a_passed_deadline_is_swept_without_a_claim(broker: Broker, db: Redis, joined) -> None:
    queued, running = job(deadline_s=0.001), job(deadline_s=30.0)
    lease = await joined()
    await broker.enqueue([running])
    await lease.claim(1, 1, 0)
    await broker.enqueue([queued])
    await eventually(lambda: _passed(broker, queued))
    assert await lease.reap(3) == (0, 0, 1, 0)
    # a running one is its worker's to stop, for a second
    now = int(await db.zscore(broker.keys.deadlines, running.id)) - 30_000
    await db.hset(broker.keys.job(running.id), "e", now)
    await db.zadd(broker.keys.deadlines, {running.id: now})
    assert await lease.reap(3) == (0, 0, 0, 0)
    await db.hset(broker.keys.job(running.id), "e", now - 2000)
    await db.zadd(broker.keys.deadlines, {running.id: now - 2000})
    assert await lease.reap(3) == (0, 0, 1, 0)
    assert [reply.outcome.outcome for reply in await replies(broker)] == ["expired", "expired"]
    assert await lease.complete([Finished(running.id, 1, 0, result(running))]) == ["fenced"]
    assert await lease.held() == frozenset()


async def test_a_worker_expires_its_own(broker: Broker, joined) -> None:
    one = job(n=2, deadline_s=30.0)
    await broker.enqueue([one])
    lease, other = await joined("w1"), await joined("w2")
    await lease.claim(1, 9, 0)
    await lease.complete([Finished(one.id, 1, 0, result(one, 0))])
    assert not await other.expire(one.id, 1)
    assert not await lease.expire(one.id, 2)
    assert await lease.expire(one.id, 1)
    assert not await lease.expire(one.id, 1)
    _, failure = [reply.outcome for reply in await replies(broker)]
    assert not failure.ok
    assert (failure.outcome, failure.published, failure.attempts) == ("expired", 1, 1)


async def test_jobs_for_newer_weights_do_not_starve_those_behind_them(broker: Broker, joined) -> None:
    await broker.enqueue([job(min_version=9, priority="high") for _ in range(200)])
    await broker.enqueue([job() for _ in range(3)])
    lease = await joined()
    found: list[str] = []
    for _ in range(10):
        found += [claim.job_id for claim in await lease.claim(8, 8, 0)]
    assert len(found) == 3


async def test_a_suspect_waits_for_a_worker_of_its_own(broker: Broker, joined) -> None:
    suspect, others = job(), [job() for _ in range(3)]
    await broker.enqueue([suspect])
    ward = await joined("w1")
    await ward.claim(1, 9, 0)
    await ward.release([Release(suspect.id, 1, lost=True)], 2)
    assert (await broker.load()).suspects == 1
    await broker.enqueue(others)
    # Another worker is in the middle of something: it takes the turn, finishes that first, and gets the suspect alone.
    busy = await joined("w2")
    (held,) = await _claim_past_suspects(busy, broker)
    assert await busy.claim(9, 9, 0) == []
    assert held.job_id == others[0].id
    await busy.complete([Finished(held.job_id, 1, 0, result(others[0]))])
    assert [claim.job_id for claim in await busy.claim(9, 9, 0)] == [suspect.id]
    assert await busy.claim(9, 9, 0) == []
    # Meanwhile everybody else goes on.
    assert [claim.job_id for claim in await ward.claim(9, 9, 0)] == [one.id for one in others[1:]]
    await busy.complete([Finished(suspect.id, 2, 0, result(suspect, attempt=2))])
    assert await busy.claim(9, 9, 0) == []
    assert (await broker.load()).open_jobs == 2


async def _claim_past_suspects(lease: Lease, broker: Broker) -> list[Claim]:
    """One ordinary job for a worker that comes while suspects are there: as if it had claimed it before."""
    aside = await broker.redis.lpop(broker.keys.suspects)
    claims = await lease.claim(1, 9, 0)
    await broker.redis.rpush(broker.keys.suspects, aside)
    return claims
