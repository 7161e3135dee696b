"""Cancelling by client and by group, from anywhere, and what a client finds when it comes back."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, streams
from support.pools.pool import eventually, replies, shard_with, worker
from support.specimens.messages import SHORT, job

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, JobFailure, RolloutResult
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = SamplingParams(max_new_tokens=100_000)


async def test_cancel_everything_of_one_client(broker: Broker, joined) -> None:
    lease = await joined()
    mine, others = [job() for _ in range(700)], [job(reply_to="other") for _ in range(5)]
    await broker.enqueue(mine + others)
    await lease.claim(200, 200, 0)
    assert set(await broker.open_jobs("client")) == {one.id for one in mine}
    assert await broker.cancel_client("client") == 700
    assert await broker.cancel_client("client") == 0
    assert await broker.open_jobs("client") == {}
    assert not any([await part.redis.exists(part.keys.client("client")) for part in broker.parts])
    assert (await broker.load()).open_jobs == 5
    failures = [reply.outcome for reply in await replies(broker)]
    assert {failure.job_id for failure in failures} == {one.id for one in mine}
    assert {failure.outcome for failure in failures if isinstance(failure, JobFailure)} == {"cancelled"}


async def test_cancel_one_group(broker: Broker) -> None:
    a, b, single = [job(group_id="a") for _ in range(3)], [job(group_id="b") for _ in range(2)], job()
    await broker.enqueue([*a, *b, single, job(group_id="a", reply_to="other")])
    assert await broker.cancel_client("client", "a") == 3
    assert await broker.cancel_client("client", single.id) == 1  # a job without a group is its own
    assert await broker.open_jobs("client") == {one.id: "b" for one in b}


async def test_running_samples_stop_when_they_are_cancelled(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=10.0)) as running:
        await broker.enqueue([job(sampling=LONG) for _ in range(40)])
        await eventually(lambda: running.generation.running == 40)
        await broker.cancel_client("client")
        await eventually(lambda: running.generation.running == 0)
        assert running.status.held == 0


async def test_a_client_that_comes_back_waits_for_what_is_still_open(redis_db: str, broker: Broker) -> None:
    first = await RolloutClient(redis_db, client_id="client").open()
    jobs = [job(sampling=SHORT, group_id="g", n=2) for _ in range(5)]
    await first.submit_many(jobs)
    await first.aclose()
    async with RolloutClient(redis_db, client_id="client") as second:
        assert second.outstanding == 5
        async with worker(redis_db):
            groups = [group async for group in second.groups(timeout=10)]
    assert [group.group_id for group in groups] == ["g"]
    assert len(groups[0].results) == 10


async def test_a_job_partly_taken_before_the_restart_ends(redis_db: str, broker: Broker) -> None:
    async with worker(redis_db), RolloutClient(redis_db, client_id="client") as first:
        handle = await first.submit(job(sampling=SHORT, n=3))
        await eventually(lambda: arrived(first) == 3)
        found = await replies(broker)
    await shard_with(broker, handle.job_id).ack("client", [found[-1]])  # the one that says it is the last
    async with RolloutClient(redis_db, client_id="client") as second:
        outcomes = [outcome async for outcome in second.results(timeout=5)]
        assert {outcome.sample for outcome in outcomes if isinstance(outcome, RolloutResult)} == {
            reply.outcome.sample for reply in found[:2] if isinstance(reply.outcome, RolloutResult)
        }
        assert handle.n == 3


@pytest.mark.one_shard
async def test_entries_behind_the_readers_back_are_found(redis_db: str, broker: Broker, db: Redis) -> None:
    """After a failover the new primary's stream may go on below the ids that were read."""
    stream = broker.keys.reply("client")
    async with worker(redis_db) as running, RolloutClient(redis_db, client_id="client") as client:
        await client.submit(job(sampling=SHORT))
        done = [outcome async for outcome in client.results(timeout=10)]
        again = job(sampling=SHORT)
        await client.submit(again)
        await eventually(lambda: arrived(client) == 1)
        (entry,) = await db.xrange(stream)
        await running.stop()
        # The stream as a replica would have it that missed all this: shorter, and with lower ids to come.
        (reader,) = streams(client)
        reader._last = "9999999999999-0"
        await client.submit(later := job(sampling=SHORT))
        async with worker(redis_db):
            taken = [outcome async for outcome in client.results(timeout=10)]
        assert {outcome.job_id for outcome in taken} == {again.id, later.id}
        # An acknowledged entry that comes back is not handed out a second time.
        await eventually(lambda: reader._acks == [] and reader._unacked == set())
        await db.xadd(stream, entry[1])
        await client.submit(last := job(sampling=SHORT))
        async with worker(redis_db):
            assert [outcome.job_id async for outcome in client.results(timeout=10)] == [last.id]
        assert client.repeats == 1
    assert len(done) == 1


@pytest.mark.one_shard
async def test_open_jobs_are_read_by_pages(broker: Broker, db: Redis) -> None:
    """A client may have a million: Redis is never busy with all of them at once."""
    jobs = [job() for _ in range(2000)]
    await broker.enqueue(jobs)
    await db.config_resetstat()
    assert await broker.open_jobs("client") == {one.id: one.id for one in jobs}
    stats = await db.info("commandstats")
    assert "cmdstat_smembers" not in stats
    assert stats["cmdstat_sscan"]["calls"] >= 3
