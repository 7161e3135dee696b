"""Outcomes know what was asked for, and a handle is all that is needed to wait for its job."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.pools.clients import arrived
from support.pools.pool import eventually, worker
from support.specimens.messages import SHORT, tokens

from rolloutmq import Group, JobFailed, JobFailure, RolloutClient, RolloutMQError, RolloutResult, WaitTimeout
from rolloutmq.messages import decode, encode
from rolloutmq.messages.journal import read
from rolloutmq.producer import JobHandle


@pytest.fixture
async def waiting(redis_db: str) -> AsyncIterator[RolloutClient]:
    """A client of a pool without workers."""
    async with RolloutClient(redis_db, client_id="client") as opened:
        yield opened


def prompts(group: Group) -> list[list[int] | None]:
    return [None if it.prompt_ids is None else it.prompt_ids.tolist() for it in (*group.results, *group.failures)]


async def test_results_and_groups_know_their_prompt_and_metadata(client: RolloutClient, serving: None) -> None:
    jobs = [tokens(token_ids=[i, 2], n=2, group_id=g, metadata={"i": i, "of": g}) for i, g in ((1, "a"), (1, "b"))]
    await client.submit_many([*jobs, tokens(token_ids=[9], group_id="b", metadata={"i": 9, "of": "b"})])
    first, second = sorted([group async for group in client.groups(10)], key=lambda group: group.group_id)
    assert prompts(first) == [[1, 2], [1, 2]]
    assert (first.prompt_ids.tolist(), first.metadata) == ([1, 2], {"i": 1, "of": "a"})
    assert prompts(second) == [[1, 2], [1, 2], [9]]
    assert (second.prompt_ids, second.metadata) == (None, {"of": "b"})  # only what all of its jobs share
    assert Group("empty", (), ()).prompt_ids is None


async def test_a_failure_knows_them_too(waiting: RolloutClient) -> None:
    handle = await waiting.submit(token_ids=[4, 5], metadata={"i": 1})
    await waiting.cancel([handle])
    (failure,) = [one async for one in waiting.results(10)]
    assert isinstance(failure, JobFailure)
    assert (failure.prompt_ids.tolist(), failure.metadata) == ([4, 5], {"i": 1})


async def test_a_prompt_that_the_client_adds_does_not_travel(client: RolloutClient, serving: None) -> None:
    (result,) = await (await client.submit(token_ids=[1, 2], sampling=SHORT))
    assert result.prompt_ids is not None
    assert decode(encode(result), RolloutResult).prompt_ids is None


async def test_batches_streams_and_sessions_know_their_prompts(client: RolloutClient, serving: None) -> None:
    groups = await client.generate([[1], [2, 3]], SHORT, metadata={"step": 4})
    assert [prompts(group) for group in groups] == [[[1]], [[2, 3]]]
    assert [group.metadata for group in groups] == [{"step": 4}] * 2
    deltas = [delta async for delta in client.stream(token_ids=[7, 8], sampling=SHORT)]
    assert deltas[-1].result is not None
    assert deltas[-1].result.prompt_ids is not None
    assert deltas[-1].result.prompt_ids.tolist() == [7, 8]
    async with client.session(token_ids=[1], sampling=SHORT) as session:
        turn = await session.generate([2])
        assert turn.prompt_ids.tolist() == [1, 2]


async def test_after_a_restart_the_prompts_of_open_jobs_are_read_back(redis_db: str) -> None:
    async with RolloutClient(redis_db, client_id="client") as first:
        await first.submit_many([tokens(token_ids=[i, i], group_id="g", metadata={"k": "v"}) for i in (1, 2)])
    async with RolloutClient(redis_db, client_id="client") as second, worker(redis_db):
        (group,) = [one async for one in second.groups(10)]
    assert sorted(map(str, prompts(group))) == ["[1, 1]", "[2, 2]"]
    assert group.metadata == {"k": "v"}


async def test_after_a_restart_the_prompts_of_ended_jobs_are_those_of_jobs_submitted_again(redis_db: str) -> None:
    again, lost = tokens(token_ids=[1, 1], metadata={"i": 1}), tokens(token_ids=[2, 2], metadata={"i": 2})
    async with RolloutClient(redis_db, client_id="client") as first, worker(redis_db):
        await first.submit_many([again, lost])
        await eventually(lambda: arrived(first) == 2)
    async with RolloutClient(redis_db, client_id="client") as second:
        await second.submit(again)
        found = {one.job_id: one async for one in second.results(10)}
    assert found[again.id].prompt_ids.tolist() == [1, 1]
    assert found[lost.id].prompt_ids is None
    assert [found[job.id].metadata for job in (again, lost)] == [{"i": 1}, {"i": 2}]


async def test_long_jobs_are_not_read_back(waiting: RolloutClient) -> None:
    short = await waiting.submit(token_ids=[1])
    long = await waiting.submit(token_ids=[1], metadata={"x": "y" * (1 << 18)})
    assert (await waiting.broker.submitted([short.job_id, long.job_id, "0" * 32])).keys() == {short.job_id}
    await waiting.cancel([short])
    assert await waiting.broker.submitted([short.job_id]) == {}


async def test_a_handle_is_awaited(client: RolloutClient, serving: None) -> None:
    handles = await client.submit_many([tokens(n=2), tokens(n=3)])
    assert [len(results) for results in await asyncio.gather(*handles)] == [2, 3]
    assert [len(await (await client.submit(tokens(n=n))).result(10)) for n in (1, 2)] == [1, 2]
    with pytest.raises(RolloutMQError, match="taken before"):
        await handles[0]


async def test_a_handle_that_is_not_answered(waiting: RolloutClient) -> None:
    handle = await waiting.submit(tokens())
    with pytest.raises(WaitTimeout):
        await handle.result(timeout=0.05)
    await waiting.cancel([handle])
    with pytest.raises(JobFailed, match="cancelled"):
        await handle
    with pytest.raises(RolloutMQError, match=r"use client\.wait"):
        await JobHandle(handle.job_id, "g", 1)


@pytest.mark.one_shard
async def test_a_wait_that_has_taken_its_results_cannot_be_cancelled_out_of_them(
    client: RolloutClient, serving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many acknowledgements may be due, and Redis slow to take them: whoever took the results gets them."""
    handle = await client.submit(tokens())
    await eventually(lambda: arrived(client) == 1)
    sending, sent = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> None:
        sending.set()
        await sent.wait()

    monkeypatch.setattr("rolloutmq.producer.inbox.reader.READ_COUNT", 1)
    monkeypatch.setattr(client.broker, "ack", slow)
    waiting = asyncio.create_task(client.wait(handle, 10))
    await sending.wait()
    waiting.cancel()
    assert len(await waiting) == 1
    sent.set()


async def test_an_acknowledgement_that_cannot_be_made_ends_the_client_and_says_why(
    redis_db: str, serving: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(closing: bool) -> bool:
        if closing:
            return False
        raise OSError("the disk is full")

    monkeypatch.setattr("rolloutmq.producer.inbox.reader.READ_COUNT", 1)
    async with RolloutClient(redis_db, before_ack=full) as client:
        await (await client.submit(tokens()))
        later = await client.submit(tokens(min_version=9))
        with pytest.raises(RolloutMQError, match="stopped") as caught:
            await later.result(10)
        assert "disk is full" in str(caught.value.__cause__)


async def test_what_was_taken_is_not_kept_for_the_journal(redis_db: str, serving: None, tmp_path: Path) -> None:
    async with RolloutClient(redis_db, before_ack=lambda closing: closing, journal=tmp_path) as client:
        (result,) = await (await client.submit(tokens()))
        job_id, kept = result.job_id, weakref.ref(result.token_ids)
        del result
        await eventually(lambda: gc.collect() >= 0 and kept() is None)  # though nothing has been acknowledged yet
    consumed = [entry for entry in read(tmp_path) if entry.event == "consumed"]
    assert [(entry.job_id, entry.sample, entry.attempt) for entry in consumed] == [(job_id, 0, 1)]
