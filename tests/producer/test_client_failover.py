"""What a failover takes back, and a client that must not notice; what a restart and a full pool leave behind."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, flush, streams
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT, job, result

from rolloutmq import PoolBusy, RolloutClient, RolloutMQError
from rolloutmq.messages import Broker, Caps, Finished, InvalidField, encode


async def test_the_last_sample_is_one_that_came_again(redis_db: str, broker: Broker, db: Redis) -> None:
    """Sample 0 was read, the failover lost it, and it was generated again after sample 1."""
    one = job(n=2)
    stream = broker.keys.reply("client")
    async with RolloutClient(redis_db, client_id="client") as client:
        handle = await client.submit(one)
        for sample, last in ((0, 0), (1, 0), (0, 1)):
            await db.xadd(stream, {"j": one.id, "s": sample, "m": encode(result(one, sample)), "l": last})
        assert [found.sample for found in await client.wait(handle, timeout=5)] == [0, 1]
        assert client.outstanding == 0


@pytest.mark.one_shard
async def test_an_outcome_that_came_again_stays_as_long_as_the_first_one(
    redis_db: str, broker: Broker, db: Redis
) -> None:
    """The failover lost what was read, the worker published it again, and then the client died before its caller came
    back. Its next process finds the outcome on the new primary."""
    one = job()
    stream, entry = broker.keys.reply("client"), {"j": one.id, "s": 0, "m": encode(result(one)), "l": 1}
    async with RolloutClient(redis_db, client_id="client") as client:
        await client.submit(one)
        outcomes = client.results(5)
        await db.xadd(stream, entry, id="1000-0")  # type: ignore[arg-type]
        assert (await anext(outcomes)).ok
        await db.delete(stream)
        await db.xadd(stream, entry, id="1001-0")  # type: ignore[arg-type]
        await eventually(lambda: client.repeats == 1)
        await flush(client)
        assert await db.xlen(stream) == 1
        assert await anext(outcomes, None) is None
    assert await db.xlen(stream) == 0


async def test_an_entry_below_the_newest_that_was_read(redis_db: str, broker: Broker, db: Redis) -> None:
    """The stream of the new primary has one entry, as many as were read, but another one with a lower id."""
    a, b = job(), job()
    stream = broker.keys.reply("client")
    async with RolloutClient(redis_db, client_id="client") as client:
        (first, _) = await client.submit_many([a, b])
        await db.xadd(stream, {"j": b.id, "s": 0, "m": encode(result(b)), "l": 1}, id="2000-0")
        await eventually(lambda: arrived(client) == 1)
        await db.delete(stream)
        await db.xadd(stream, {"j": a.id, "s": 0, "m": encode(result(a)), "l": 1}, id="1500-0")
        assert len(await client.wait(first, timeout=5)) == 1


async def test_a_group_is_whole_after_a_restart(redis_db: str, broker: Broker) -> None:
    members = [job(group_id="g", sampling=SHORT) for _ in range(3)]
    async with RolloutClient(redis_db, client_id="client") as first:
        await first.submit_many(members)
        await broker.cancel([members[0].id])  # it failed before there was any result that could name the group
        async with worker(redis_db, max_running=1, prefetch=0):
            await eventually(lambda: arrived(first) >= 2)
    async with RolloutClient(redis_db, client_id="client") as second, worker(redis_db):
        groups = [group async for group in second.groups(timeout=10)]
    assert [(group.group_id, len(group.results), len(group.failures)) for group in groups] == [("g", 2, 1)]


@pytest.mark.one_shard
async def test_jobs_that_had_ended_are_not_waited_for_when_the_pool_is_busy(redis_db: str, broker: Broker) -> None:
    jobs = [job(sampling=SHORT) for _ in range(4)]
    async with worker(redis_db), RolloutClient(redis_db, client_id="client") as client:
        await client.submit(jobs[0])
        assert len([outcome async for outcome in client.results(timeout=5)]) == 1
    async with RolloutClient(redis_db, client_id="client", caps=Caps(jobs=2)) as again:
        with pytest.raises(PoolBusy) as caught:
            await again.submit_many(jobs)
        assert (caught.value.accepted, caught.value.states) == (3, ["done", "new", "new"])
        assert again.outstanding == 2
        async with worker(redis_db):
            assert len([outcome async for outcome in again.map(jobs, timeout=5)]) == 3


async def test_closing_ends_a_submission_that_waits_for_room(redis_db: str, broker: Broker) -> None:
    client = await RolloutClient(redis_db, caps=Caps(jobs=1)).open()
    await client.submit(job(reply_to=""))
    waiting = asyncio.create_task(client.submit(job(reply_to=""), timeout=None))
    await eventually(lambda: client._core.inbox.jobs == 1 and not waiting.done())
    await client.aclose()
    with pytest.raises(RolloutMQError, match="closed"):
        await waiting
    assert (await broker.load()).accepted == 1


async def test_no_group_is_not_every_group(redis_db: str, broker: Broker) -> None:
    one = job(sampling=SHORT)
    async with RolloutClient(redis_db, client_id="client") as client:
        await client.submit(one)
        assert await client.cancel_group(one.group_id) == 0
        with pytest.raises(InvalidField, match="group_id=''"):
            await broker.cancel_client("client", "")
        assert await client.cancel_group(one.group) == 1


@pytest.mark.one_shard
async def test_a_read_that_was_too_much_is_made_smaller(redis_db: str, broker: Broker, joined) -> None:
    lease = await joined()
    async with RolloutClient(redis_db, client_id="client") as client:
        jobs = [job() for _ in range(100)]
        await client.submit_many(jobs)
        by_id = {one.id: one for one in jobs}
        for claim in await lease.claim(100, 100, 0):
            await lease.complete([Finished(claim.job_id, 1, 0, result(by_id[claim.job_id]))])
        await eventually(lambda: arrived(client) == 100)
        assert streams(client)[0]._count == 512  # small ones: many at a time
