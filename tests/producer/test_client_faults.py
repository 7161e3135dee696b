"""What a trainer's client holds on to when submissions, loops and whole processes end half way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, crash, waits
from support.pools.pool import eventually, stream_length, worker
from support.specimens.messages import result, tokens

from rolloutmq import (
    ClientReplaced,
    GenerateJob,
    InvalidField,
    JobFailed,
    JobFailure,
    PoolBusy,
    RolloutClient,
    RolloutMQError,
    SamplingParams,
)
from rolloutmq.messages import Broker, Caps, Finished
from rolloutmq.messages.scripts import calls
from rolloutmq.messages.scripts.source import script_source
from rolloutmq.producer.inbox import reader
from rolloutmq.producer.sending import Sent, enqueued
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def forget_ended(db: Redis, broker: Broker, jobs: Sequence[GenerateJob]) -> None:
    """As if the hour were over for which the pool remembers what has ended."""
    assert await db.delete(*(broker.keys.job(one.id) for one in jobs)) == len(jobs)


async def test_a_submission_that_fails_after_its_results_arrived(
    client: RolloutClient, serving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part was accepted and answered before the second failed: its results are not thrown away."""
    pair, single, lost = [tokens(group_id="g", n=2) for _ in range(2)], tokens(), tokens()

    async def half(broker: Broker, jobs: Sequence[GenerateJob], *_: object) -> Sent:
        await enqueued(broker, jobs[:-1])
        await eventually(lambda: arrived(client) == 5)
        raise ConnectionError("gone")

    for module in ("core", "sending"):
        monkeypatch.setattr(f"rolloutmq.producer.{module}.enqueued", half)
    with pytest.raises(ConnectionError):
        await client.submit_many([*pair, single, lost])
    assert client.outstanding == 3
    groups = {group.group_id: len(group.results) async for group in client.groups(5)}
    assert groups == {"g": 4, single.id: 1}


async def test_a_job_that_is_too_large_leaves_none_in_the_pool(redis_db: str) -> None:
    async with RolloutClient(redis_db, caps=Caps(payload=1000)) as client:
        jobs = [tokens() for _ in range(600)]
        jobs[599] = tokens(token_ids=[1] * 1000)
        with pytest.raises(InvalidField, match="1000 bytes"):
            await client.submit_many(jobs)
        assert (await client.load()).open_jobs == client.outstanding == 0


async def leave_at_the_second(client: RolloutClient, loop: str, jobs: list[GenerateJob], error: bool) -> None:
    if loop == "map":
        source: AsyncIterator[object] = client.map(jobs, timeout=10)
    else:
        await client.submit_many(jobs)
        source = client.results(10) if loop == "results" else client.groups(10)
    seen = 0
    async for _ in source:
        seen += 1
        if seen == 2:
            if error:
                raise ZeroDivisionError
            break


async def rest_of(client: RolloutClient) -> int:
    """How many outcomes a loop gets. In a task of its own it is no return of the code that left another loop."""
    return len([one async for one in client.results(10)])


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("loop", ["results", "groups", "map"])
async def test_what_a_loop_did_not_come_back_from_is_given_again(redis_db: str, loop: str, error: bool) -> None:
    async with worker(redis_db):
        async with RolloutClient(redis_db, client_id="client") as first:
            with pytest.raises(ZeroDivisionError) if error else contextlib.nullcontext():
                await leave_at_the_second(first, loop, [tokens() for _ in range(3)], error)
            assert await asyncio.create_task(rest_of(first)) == 1  # not again in this process
        async with RolloutClient(redis_db, client_id="client") as second:
            assert await rest_of(second) == 1
        async with RolloutClient(redis_db, client_id="client") as third:
            assert third.outstanding == 0


@pytest.mark.one_shard
async def test_first_calls_at_the_same_time_start_one_reader(redis_db: str, serving: None) -> None:
    before = asyncio.all_tasks()
    client = RolloutClient(redis_db)
    handles = await asyncio.gather(*(client.submit(tokens()) for _ in range(4)))
    assert len([task for task in asyncio.all_tasks() - before if task.get_coro().__qualname__.endswith("._read")]) == 1  # type: ignore[union-attr]
    for handle in handles:
        await client.wait(handle, 10)
    assert client.repeats == 0
    await client.aclose()


async def test_closing_wakes_whoever_waits(client: RolloutClient) -> None:
    handle = await client.submit(tokens())
    calls = [asyncio.create_task(client.wait(handle)), asyncio.create_task(anext(client.results(), None))]
    await eventually(lambda: waits(client) == 2)
    await client.aclose()
    for wait in calls:
        with pytest.raises(RolloutMQError, match="client client is closed"):
            await asyncio.wait_for(wait, 5)
    with pytest.raises(RolloutMQError, match="is closed"):
        await client.submit(tokens())


@pytest.mark.parametrize("by_map", [True, False])
@pytest.mark.one_shard
async def test_resuming_after_the_pool_has_forgotten(redis_db: str, broker: Broker, db: Redis, by_map: bool) -> None:
    """What ended and was not taken is given, not generated again."""
    jobs = [tokens(n=2) for _ in range(4)]
    async with worker(redis_db, max_running=32) as running:
        first = await RolloutClient(redis_db, client_id="client").open()
        await first.submit_many(jobs)
        await eventually(lambda: arrived(first) == 8)
        await crash(first)
        await forget_ended(db, broker, jobs)
        async with RolloutClient(redis_db, client_id="client") as second:
            if by_map:
                found = [one async for one in second.map([*jobs, tokens()], timeout=10)]
                assert len(found) == 9
            else:
                assert [handle.state for handle in await second.submit_many(jobs)] == ["done"] * 4
                assert len([one async for one in second.results(5)]) == 8
            assert second.repeats == 0
        assert running.generation.finished == 8 + by_map


@pytest.mark.one_shard
async def test_pool_busy_counts_over_the_callers_list(redis_db: str, broker: Broker, db: Redis) -> None:
    old = [tokens(), tokens()]
    async with worker(redis_db):
        first = await RolloutClient(redis_db, client_id="client").open()
        await first.submit_many(old)
        await eventually(lambda: arrived(first) == 2)
        await crash(first)
    await forget_ended(db, broker, old)
    async with RolloutClient(redis_db, client_id="client", caps=Caps(jobs=1)) as second:
        twice, refused = tokens(), tokens()
        really = second.broker.enqueue

        async def one_by_one(jobs: Sequence[GenerateJob], **_: object) -> list[str]:
            for count, one in enumerate(jobs):
                try:
                    await really([one])
                except PoolBusy as busy:
                    busy.accepted, busy.states = count, ["new"] * count
                    raise
            raise AssertionError("not busy")

        second.broker.enqueue = one_by_one  # type: ignore[method-assign]
        with pytest.raises(PoolBusy) as caught:
            await second.submit_many([old[0], twice, old[1], refused, twice])
        assert caught.value.accepted == 3
        assert second.outstanding == 3  # the two old ones, and the one that is named once more behind the refused one
        assert second._core.inbox.tracked(twice.id) is not None


async def test_an_id_that_is_taken_is_refused_where_it_is_submitted(redis_db: str, client: RolloutClient) -> None:
    one = tokens()
    await client.submit(one)
    async with RolloutClient(redis_db) as second:
        with pytest.raises(InvalidField, match="a job that client client has open"):
            await second.submit(one)
        assert second.outstanding == 0
    other = tokens(id=one.id, token_ids=[9, 9])
    with pytest.raises(InvalidField, match="another job needs another id"):
        await client.submit(other)
    async with worker(redis_db):
        await eventually(lambda: arrived(client) == 1)
        for wrong in (other, tokens(id=one.id, n=2), tokens(id=one.id, metadata={"k": 1})):
            with pytest.raises(InvalidField, match="another job needs another id"):
                await client.submit_many([tokens(), wrong])
        (result,) = await client.wait(await client.submit(one), 10)
    assert result.prompt_ids.tolist() == one.token_ids.tolist()
    assert client.outstanding == 0


async def test_the_client_that_opened_last_gets_the_results(redis_db: str, broker: Broker, db: Redis) -> None:
    """The one before is told, also where it waits, and hands out nothing any more. The newest one has all of it."""
    first = await RolloutClient(redis_db, client_id="client").open()
    jobs = [tokens() for _ in range(20)]
    await first.submit_many(jobs)
    waiting = asyncio.create_task(first.wait(await first.submit(tokens(min_version=9))))
    async with worker(redis_db, max_running=32):
        await eventually(lambda: arrived(first) == 20)
        async with RolloutClient(redis_db, client_id="client") as second:
            with pytest.raises(ClientReplaced, match="client client was opened again"):
                await waiting
            for call in (first.submit(tokens()), anext(first.results()), first.cancel(["x"])):
                with pytest.raises(ClientReplaced):
                    await call
            await first.aclose()
            assert await second.cancel_all() == 1
            found = [one async for one in second.results(10)]
    assert {one.job_id for one in found if one.ok} == {one.id for one in jobs}
    assert len(found) == 21
    assert await stream_length(db, broker) == 0
    assert await db.ttl(broker.keys.reader("client")) > 0


async def test_the_same_job_twice_in_one_submission(client: RolloutClient, serving: None) -> None:
    one = tokens()
    assert [handle.job_id for handle in await client.submit_many([one, one])] == [one.id] * 2
    assert len([found async for found in client.results(5)]) == 1


async def test_a_job_partly_taken_whose_last_sample_was_acknowledged_first(
    redis_db: str, broker: Broker, db: Redis, serving: None
) -> None:
    """A loop that was left keeps its sample in the stream, other code acknowledges the last one: nothing more comes."""
    one = tokens(n=2)
    async with RolloutClient(redis_db, client_id="client") as first:
        await first.submit(one)
        await eventually(lambda: arrived(first) == 2)
        async for _ in first.results(5):
            break
        assert await asyncio.create_task(rest_of(first)) == 1
    assert await stream_length(db, broker) == 1
    async with RolloutClient(redis_db, client_id="client") as second:
        assert (await second.submit(one)).state == "done"
        assert len(await asyncio.wait_for(second.wait(await second.submit(one)), 5)) == 1
        assert second.outstanding == 0


async def test_deadlines_pass_without_any_worker(client: RolloutClient) -> None:
    await client.submit(tokens(deadline_s=0.3))
    (failure,) = [one async for one in client.results(10)]
    assert failure.outcome == "expired"


async def test_a_failure_that_waited_joins_the_group_of_its_job(redis_db: str, serving: None) -> None:
    """A failure does not say which group its job was of; the job, submitted again, does."""
    bad, good = GenerateJob(text="no tokenizer", group_id="g", n=3), tokens(group_id="g")
    first = await RolloutClient(redis_db, client_id="client").open()
    await first.submit(bad)
    await eventually(lambda: arrived(first) == 1)
    await crash(first)
    async with RolloutClient(redis_db, client_id="client") as second:
        assert [handle.state for handle in await second.submit_many([bad, good])] == ["dead", "new"]
        assert second._core.inbox.samples == 4
        (group,) = [group async for group in second.groups(10)]
        assert (group.group_id, len(group.results), len(group.failures)) == ("g", 1, 1)
        assert second._core.inbox.samples == 0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait look around often."""
    monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 20)
    monkeypatch.setattr(reader, "LONGEST_BLOCK_MS", 50)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("lost", ["stream", "everything"])
@pytest.mark.one_shard
async def test_a_client_whose_results_redis_has_lost_is_told(
    client: RolloutClient, db: Redis, broker: Broker, joined: Any, lost: str
) -> None:
    one, kept = tokens(n=2), tokens()
    handles = await client.submit_many([one, kept])
    lease = await joined()
    claims = {claim.job_id: claim for claim in await lease.claim(9, 9, 0)}
    first = Finished(one.id, 1, 0, result(one, 0))
    assert await lease.complete([first]) == ["ok"]
    await eventually(lambda: arrived(client) == 1, what="the first sample is here")
    async with db.pipeline(transaction=True) as pipe:  # no read comes in between
        if lost == "stream":
            last = Finished(one.id, 1, 1, result(one, 1))
            sample = (last.job_id, last.attempt, last.sample, last.payload)
            args = calls.complete("w1", sample).args
            pipe.eval(script_source("complete"), 1, broker.keys.load, broker.keys.prefix, *args)
        else:
            pipe.delete(broker.keys.job(one.id), broker.keys.client("client"))
        pipe.delete(broker.keys.reply("client"))
        await pipe.execute()
    ended = await client.ending(handles[0], 10)
    assert [it.sample for it in ended.results] == [0]
    (failure,) = ended.failures
    assert (failure.job_id, failure.group_id, failure.outcome) == (one.id, one.group, "dead")
    assert "Redis has lost" in failure.cause
    assert await lease.complete([Finished(kept.id, claims[kept.id].attempt, 0, result(kept, 0))]) == ["ok"]
    assert len(await client.wait(handles[1], 10)) == 1
    assert client.outstanding == 0


@pytest.mark.usefixtures("quick")
@pytest.mark.one_shard
@pytest.mark.parametrize("lost", [slice(None), slice(-5, None), slice(0, 5), slice(200, 201)], ids=str)
async def test_jobs_that_redis_loses_right_after_it_took_them_are_told(
    client: RolloutClient, db: Redis, broker: Broker, lost: slice
) -> None:
    """No look has seen them. Whoever was told that a job is accepted hears what becomes of it."""
    jobs = [tokens() for _ in range(300)]
    await client.submit_many(jobs)
    gone = {job.id for job in jobs[lost]}
    if len(gone) == len(jobs):
        await db.flushdb()
    else:
        await db.delete(*(broker.keys.job(job_id) for job_id in gone))
    told = [await anext(client.results(30)) for _ in gone]
    assert {one.job_id for one in told} == gone
    assert all(isinstance(one, JobFailure) and one.outcome == "dead" for one in told)
    assert client.outstanding == len(jobs) - len(gone)


@pytest.mark.usefixtures("quick")
@pytest.mark.one_shard
async def test_a_call_whose_tasks_redis_loses_ends(client: RolloutClient, db: Redis, broker: Broker) -> None:
    call = asyncio.create_task(client.score([1, 2], [[3]]))
    await eventually(lambda: any(it.accepted for it in client._core.inbox.open()))
    await db.flushdb()
    with pytest.raises(JobFailed, match="Redis has lost"):
        await asyncio.wait_for(call, 30)


@pytest.mark.usefixtures("quick")
@pytest.mark.one_shard
async def test_a_client_whose_running_job_is_gone_is_told(
    redis_db: str, client: RolloutClient, db: Redis, broker: Broker
) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=50.0)) as running:
        handle = await client.submit(tokens(sampling=SamplingParams(max_new_tokens=4000)))
        await eventually(lambda: running.generation.running == 1, what="it runs")
        await db.delete(broker.keys.job(handle.job_id))
        with pytest.raises(JobFailed, match="its record is gone"):
            await client.wait(handle, 10)
        await eventually(lambda: running.generation.running == 0, what="its slot is free")
