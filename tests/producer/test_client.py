"""What a trainer's client promises: every outcome once, in the form that was asked for, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, crash, flush, waits
from support.pools.pool import check_scripted, eventually, runs, stream_length, worker
from support.specimens.messages import SHORT, job, tokens

from rolloutmq import (
    ClientBusy,
    GenerateJob,
    InvalidField,
    JobFailed,
    JobFailure,
    PoolBusy,
    RolloutClient,
    RolloutMQError,
    RolloutResult,
    SamplingParams,
    WaitTimeout,
)
from rolloutmq.messages import Broker, Caps
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def test_wait_gives_all_samples_in_order(client: RolloutClient, serving: None) -> None:
    handle = await client.submit(token_ids=[1, 2, 3], n=5, sampling=SHORT, group_id="g")
    assert (handle.n, handle.group_id, handle.state) == (5, "g", "new")
    results = await client.wait(handle, 10)
    assert [one.sample for one in results] == [0, 1, 2, 3, 4]
    for one in results:
        check_scripted(one, 3)
    assert client.outstanding == 0


async def test_wait_timeout_then_success(redis_db: str, client: RolloutClient) -> None:
    handle = await client.submit(tokens())
    with pytest.raises(WaitTimeout, match="client"):
        await client.wait(handle, 0.05)
    with pytest.raises(TimeoutError):  # also as the builtin
        await anext(client.results(0.05))
    async with worker(redis_db):
        assert len(await client.wait(handle, 10)) == 1


async def test_a_job_that_fails(redis_db: str, client: RolloutClient, serving: None) -> None:
    handle = await client.submit(text="no tokenizer here")
    with pytest.raises(JobFailed, match="text: this worker has no tokenizer") as caught:
        await client.wait(handle, 10)
    assert isinstance(caught.value.failure, JobFailure)
    assert client.outstanding == 0


async def test_two_waits_for_one_job(client: RolloutClient, serving: None) -> None:
    """One gets the results, the other hears that they were taken: nobody gets an empty list."""
    handle = await client.submit(tokens(n=2))
    both = await asyncio.gather(*(client.wait(handle, 10) for _ in range(2)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in both) == ["RolloutMQError", "list"]


async def test_groups_come_whole_and_in_order(client: RolloutClient, serving: None) -> None:
    jobs = [tokens(n=2, group_id=f"g{i % 3}") for i in range(9)]
    await client.submit_many(jobs)
    seen: dict[str, list[tuple[str, int]]] = {}
    async for group in client.groups(10):
        assert group.ok
        assert group.group_id not in seen
        seen[group.group_id] = [(one.job_id, one.sample) for one in group.results]
    assert seen == {f"g{g}": [(one.id, sample) for one in jobs[g::3] for sample in range(2)] for g in range(3)}


async def test_a_group_with_a_failure(client: RolloutClient, serving: None) -> None:
    good, bad = tokens(group_id="g"), GenerateJob(text="x", group_id="g")
    await client.submit_many([good, bad])
    (group,) = [group async for group in client.groups(10)]
    assert not group.ok
    assert [one.job_id for one in group.results] == [good.id]
    assert [one.job_id for one in group.failures] == [bad.id]


async def test_every_outcome_is_handed_out_once(client: RolloutClient, serving: None) -> None:
    """By whatever mix of calls, from however many tasks, each of which ends."""
    handles = await client.submit_many([tokens(n=2, group_id=f"g{i % 5}") for i in range(40)])
    found: list[tuple[str, int]] = []

    async def by_results() -> None:
        async for one in client.results(10):
            assert isinstance(one, RolloutResult)
            found.append((one.job_id, one.sample))
            await asyncio.sleep(0)

    async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(by_results())
    assert sorted(found) == sorted((handle.job_id, sample) for handle in handles for sample in range(2))


async def test_a_results_loop_ends_when_a_wait_takes_the_last(redis_db: str, client: RolloutClient) -> None:
    handle = await client.submit(tokens())

    async def rest() -> list[object]:
        return [one async for one in client.results()]

    waiting = asyncio.create_task(client.wait(handle, 10))
    looping = asyncio.create_task(rest())
    async with worker(redis_db):
        taken = await waiting
        assert len(await asyncio.wait_for(looping, 5)) + len(taken) == 1


async def test_acknowledged_when_the_code_comes_back_for_the_next(
    redis_db: str, client: RolloutClient, broker: Broker, db: Redis, serving: None
) -> None:
    await client.submit_many([tokens() for _ in range(10)])
    iterator = client.results(10)
    await anext(iterator)
    await eventually(lambda: arrived(client) == 9)
    assert await stream_length(db, broker) == 10
    async for _ in iterator:
        pass  # the same loop goes on: its next round acknowledges the first one
    await client.aclose()
    assert await stream_length(db, broker) == 0


@pytest.mark.one_shard
async def test_closing_in_the_middle_of_an_acknowledgement(
    client: RolloutClient, broker: Broker, db: Redis, serving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    acknowledging, really = asyncio.Event(), client.broker.ack

    async def slow(client_id: str, entry_ids: list[str], owner: str) -> None:
        if entry_ids and not acknowledging.is_set():
            acknowledging.set()
            await asyncio.Event().wait()
        await really(client_id, entry_ids, owner)

    monkeypatch.setattr(client.broker, "ack", slow)
    await client.wait(await client.submit(tokens(n=3)), 10)
    await client.wait(await client.submit(tokens()), 10)
    await asyncio.wait_for(acknowledging.wait(), 5)
    await client.aclose()
    assert await stream_length(db, broker) == 0


async def test_a_loop_ends_when_what_it_waits_for_is_refused(
    client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitting, refuse = asyncio.Event(), asyncio.Event()

    async def refused(*_: object, **__: object) -> list[str]:
        submitting.set()
        await refuse.wait()
        raise PoolBusy("full", [])

    for part in client.broker.parts:
        monkeypatch.setattr(part, "enqueue", refused)
    submission = asyncio.create_task(client.submit(tokens()))
    await submitting.wait()
    loop = asyncio.create_task(anext(client.results(), None))
    await eventually(lambda: waits(client))
    refuse.set()
    with pytest.raises(PoolBusy):
        await submission
    assert await asyncio.wait_for(loop, 5) is None


@pytest.mark.one_shard
async def test_a_crash_gives_what_was_not_acknowledged_again(
    redis_db: str, broker: Broker, db: Redis, serving: None
) -> None:
    first = await RolloutClient(redis_db, client_id="client").open()
    jobs = [tokens() for _ in range(5)]
    await first.submit_many(jobs)
    await eventually(lambda: arrived(first) == 5)
    await crash(first)
    async with RolloutClient(redis_db, client_id="client") as second:
        states = [handle.state for handle in await second.submit_many(jobs)]
        assert states == ["done"] * 5
        found = [one.job_id async for one in second.results(5)]
        assert sorted(found) == sorted(one.id for one in jobs)
    assert await stream_length(db, broker) == 0


async def test_submitting_again_what_was_taken(client: RolloutClient, serving: None) -> None:
    one = tokens()
    await client.wait(await client.submit(one), 10)
    await flush(client)
    again = await client.submit(one)
    assert again.state == "done"
    assert client.outstanding == 0
    with pytest.raises(JobFailed, match="it had ended"):
        await client.wait(again, 1)
    assert [one async for one in client.results(1)] == []


async def test_a_crash_between_the_samples_of_a_job(redis_db: str, broker: Broker, db: Redis, serving: None) -> None:
    one = tokens(n=3)
    async with RolloutClient(redis_db, client_id="client") as first:
        await first.submit(one)
        await eventually(lambda: arrived(first) == 3)
        iterator = first.results(5)
        await anext(iterator)
        await anext(iterator)  # acknowledges the first one, and is itself not acknowledged
        await iterator.aclose()
    assert await stream_length(db, broker) == 2
    async with RolloutClient(redis_db, client_id="client") as second:
        await second.submit(one)
        assert len([found async for found in second.results(0.5)]) == 2


async def test_a_client_that_promised_too_little_memory(redis_db: str) -> None:
    async with RolloutClient(redis_db, max_outstanding=4) as client:
        await client.submit(tokens(n=3))
        with pytest.raises(ClientBusy, match="3 samples are outstanding and 2 more"):
            await client.submit(tokens(n=2))
        await client.submit(tokens(n=1))


async def test_cancel_and_cancel_group(client: RolloutClient) -> None:
    first, second = await client.submit_many([tokens(group_id="a"), tokens(group_id="b")])
    await client.submit(tokens(group_id="b"))
    assert await client.cancel([first]) == ["ok"]
    assert await client.cancel([first.job_id]) == ["cancelled"]
    assert await client.cancel_group("b") == 2
    assert await client.cancel_group("nobody") == 0
    outcomes = [one async for one in client.results(5)]
    assert [one.outcome for one in outcomes if isinstance(one, JobFailure)] == ["cancelled"] * 3
    with pytest.raises(RolloutMQError, match="taken before"):
        await client.wait(second, 1)


async def test_cancelling_stops_a_worker(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(tokens_per_s=1)
    async with worker(redis_db, engine=engine):
        handle = await client.submit(tokens(sampling=SamplingParams(max_new_tokens=1000)))
        await eventually(lambda: runs(engine))
        assert await client.cancel([handle]) == ["ok"]
        with pytest.raises(JobFailed, match="cancelled by the client"):
            await client.wait(handle, 5)
        await eventually(lambda: runs(engine, 0))


@pytest.mark.one_shard
async def test_pool_busy_keeps_what_was_accepted(redis_db: str, serving: None) -> None:
    async with RolloutClient(redis_db, caps=Caps(jobs=2)) as client:
        await client.submit(tokens(sampling=SamplingParams(max_new_tokens=2)))
        await client.submit(tokens(min_version=9, group_id="kept"))
        with pytest.raises(PoolBusy, match="at most 2"):
            await client.submit_many([tokens(), tokens(), tokens()])
        await client.cancel_group("kept")
        assert len([one async for one in client.results(10)]) == 2
        assert client.outstanding == 0


async def test_map_waits_while_the_pool_is_busy(redis_db: str, serving: None) -> None:
    async with RolloutClient(redis_db, caps=Caps(jobs=3)) as client:
        jobs = [tokens() for _ in range(20)]
        found = [one.job_id async for one in client.map(jobs, timeout=10)]
    assert sorted(found) == sorted(one.id for one in jobs)


async def test_map_keeps_to_its_window(client: RolloutClient, serving: None) -> None:
    made = taken = most = 0

    def endless():
        nonlocal made
        for _ in range(300):
            made += 1
            yield tokens()

    async for one in client.map(endless(), window=10, timeout=10):
        assert isinstance(one, RolloutResult)
        most = max(most, made - taken, client.outstanding)
        taken += 1
    assert taken == made == 300
    assert most <= 10


async def test_map_over_nothing_and_without_a_window(client: RolloutClient) -> None:
    assert [one async for one in client.map([])] == []
    with pytest.raises(InvalidField, match="window=0"):
        await anext(client.map([tokens()], window=0))


async def test_map_times_out_and_nothing_is_lost(redis_db: str, client: RolloutClient) -> None:
    with pytest.raises(WaitTimeout):
        async for _ in client.map([tokens(), tokens()], timeout=0.05):
            pass
    async with worker(redis_db):
        assert len([one async for one in client.results(10)]) == 2


async def test_a_job_for_somebody_else_is_refused(client: RolloutClient) -> None:
    with pytest.raises(InvalidField, match="reply_to='other'"):
        await client.submit(job(reply_to="other"))
    with pytest.raises(InvalidField, match="client_id"):
        RolloutClient("redis://h", client_id="no spaces")
    assert client.outstanding == 0


async def test_two_clients_get_their_own(redis_db: str, serving: None) -> None:
    async with RolloutClient(redis_db) as one, RolloutClient(redis_db) as two:
        first, second = await one.submit(tokens()), await two.submit(tokens())
        assert (await two.wait(second, 10))[0].job_id == second.job_id
        assert (await one.wait(first, 10))[0].job_id == first.job_id


async def test_redis_restarts_during_a_wait(tmp_path) -> None:
    with EmbeddedRedis(directory=tmp_path, appendonly=True, config={"appendfsync": "always"}) as server:
        async with RolloutClient(server.url) as client:
            handle = await client.submit(tokens(n=2))
            waiting = asyncio.create_task(client.wait(handle, 20))
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            async with worker(server.url):
                assert len(await waiting) == 2


async def test_closing_twice(client: RolloutClient) -> None:
    await client.aclose()
    await client.aclose()
