"""What a pool may take of Redis' memory: open jobs, their bytes, and results nobody has taken."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived
from support.pools.pool import eventually, replies, worker
from support.specimens.messages import SHORT, job, result

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Finished, PoolBusy, RolloutResult, encode
from rolloutmq.messages.broker.broker import Caps


def large(**fields: object) -> object:
    return job(token_ids=list(range(1000)), **fields)


async def test_a_batch_is_accepted_up_to_the_job_that_does_not_fit(db: Redis) -> None:
    small = Broker(db, "default", Caps(jobs=3))
    jobs = [job() for _ in range(5)]
    with pytest.raises(PoolBusy, match="3 jobs are open, at most 3") as caught:
        await small.enqueue(jobs)
    assert (caught.value.accepted, caught.value.states, caught.value.reason) == (3, ["new"] * 3, "jobs")
    assert (await small.load()).open_jobs == 3
    # What is in may be sent again with the rest, and does not count twice.
    await small.cancel([jobs[0].id])
    assert await small.enqueue(jobs[1:4]) == ["q", "q", "new"]


async def test_over_the_byte_cap(db: Redis) -> None:
    one = large()
    small = Broker(db, "default", Caps(nbytes=len(encode(one)) * 2))
    with pytest.raises(PoolBusy, match="bytes") as caught:
        await small.enqueue([one, large(), job()])
    assert (caught.value.accepted, caught.value.reason) == (2, "bytes")


async def test_a_known_id_is_never_busy_and_an_empty_pool_takes_any_job(db: Redis) -> None:
    small = Broker(db, "default", Caps(jobs=1, nbytes=10))
    one = large()
    assert await small.enqueue([one]) == ["new"]
    assert await small.enqueue([one]) == ["q"]


async def test_jobs_cancelled_while_queued_cannot_fill_redis(db: Redis) -> None:
    small = Broker(db, "default", Caps(jobs=10))
    await small.enqueue([job()])
    for number in range(20):  # no worker comes across the ids that were cancelled
        jobs = [job(reply_to=f"client-{number}") for _ in range(9)]
        await small.enqueue(jobs)
        with pytest.raises(PoolBusy, match="jobs are open"):
            await small.enqueue([job()])
        await small.cancel([one.id for one in jobs])
    assert (await small.load()).open_jobs == 1
    assert await db.zcard(small.keys.queues[1]) == 1
    assert await db.zrange(small.keys.turns[1], 0, -1) == [b"client"]


async def test_results_that_nobody_takes_stop_their_own_client_only(broker: Broker, db: Redis, joined) -> None:
    small = Broker(db, "default", Caps(unread=400))
    lease = await joined()
    jobs = [job() for _ in range(4)]
    await small.enqueue(jobs)
    await lease.claim(9, 9, 0)
    await lease.complete([Finished(one.id, 1, 0, result(one)) for one in jobs])
    with pytest.raises(PoolBusy, match="this client has not taken") as caught:
        await small.enqueue([job()])
    assert caught.value.reason == "unread"
    assert await small.enqueue([job(reply_to="other")]) == ["new"]
    waiting = (await small.unread())["client"]
    assert waiting == (await small.load()).unread_bytes == sum(reply.nbytes for reply in await replies(broker))
    first, *rest = await replies(broker)
    await small.ack("client", [first])
    await small.ack("client", [first])  # a repeated acknowledgement counts once
    assert (await small.unread())["client"] == waiting - first.nbytes
    await small.ack("client", rest)
    assert await small.unread() == {}
    assert (await small.load()).unread_bytes == 0
    assert await small.enqueue([job()]) == ["new"]


async def test_results_of_all_clients_count_against_the_bytes(db: Redis, joined) -> None:
    small = Broker(db, "default", Caps(nbytes=500))
    lease = await joined()
    for client in ("a", "b"):
        await small.enqueue([one := job(reply_to=client)])
        await lease.claim(9, 9, 0)
        await lease.complete([Finished(one.id, 1, 0, result(one))])
    await small.enqueue([job(reply_to="c")])
    with pytest.raises(PoolBusy) as caught:
        await small.enqueue([job(reply_to="c")])
    assert caught.value.reason == "bytes"
    assert await small.drop_replies("a") == 1
    assert await small.drop_replies("b") == 1
    assert await small.enqueue([job(reply_to="c")]) == ["new"]


async def test_a_stream_that_expired_unread_is_counted_no_more(broker: Broker, db: Redis, joined) -> None:
    lease = await joined()
    await broker.enqueue([one := job()])
    await broker.cancel([one.id])
    assert (await broker.load()).unread_bytes > 0
    await db.delete(broker.keys.reply("client"))  # as its TTL does after a week
    await lease.reap(3)
    assert await broker.unread() == {}
    assert (await broker.load()).unread_bytes == 0


async def test_submit_waits_for_room(redis_db: str, broker: Broker) -> None:
    async with RolloutClient(redis_db, client_id="client", caps=Caps(jobs=4)) as client:
        with pytest.raises(PoolBusy) as caught:
            await client.submit_many([job(sampling=SHORT) for _ in range(6)], timeout=0.1)
        assert caught.value.accepted == client.outstanding == 4
        jobs = [job(sampling=SHORT) for _ in range(20)]
        more = asyncio.create_task(client.submit_many(jobs, timeout=None))
        async with worker(redis_db):
            assert {handle.state for handle in await more} == {"new"}
            outcomes = [outcome async for outcome in client.results(timeout=10)]
        assert len(outcomes) == 24
        assert all(isinstance(outcome, RolloutResult) for outcome in outcomes)


async def test_a_slow_client_is_held_up_and_loses_nothing(redis_db: str, broker: Broker, db: Redis) -> None:
    caps = Caps(unread=2000)
    async with worker(redis_db), RolloutClient(redis_db, client_id="client", caps=caps, max_outstanding=1000) as client:
        sent = 0
        while True:
            try:
                await client.submit(job(sampling=SHORT))
            except PoolBusy as busy:
                if busy.reason == "unread":
                    break
                raise
            sent += 1
            assert sent < 1000
        await eventually(lambda: arrived(client) == sent)
        assert await db.xlen(broker.keys.reply("client")) == sent
        taken = [outcome async for outcome in client.results(timeout=10)]
        assert len(taken) == sent
        await client.submit(job(sampling=SHORT), timeout=10)  # there is room again once they are acknowledged
        assert len([outcome async for outcome in client.results(timeout=10)]) == 1
