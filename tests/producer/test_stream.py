"""Streaming through the pool: nothing that was shown is taken back, whoever dies, and the results are the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from support.pools.commanded import hurry
from support.pools.pool import check_scripted, eventually, worker
from support.specimens.messages import job, tokens

from rolloutmq import GenerateJob, JobFailed, RolloutClient, RolloutMQError, RolloutResult, SamplingParams, WaitTimeout
from rolloutmq.messages import Broker, Lease, Partial, Piece, Release, Segment
from rolloutmq.producer import Delta
from rolloutmq.worker.lease import saving
from rolloutmq.worker.scripted.engine import ScriptedEngine

RATE = 400.0


def slow(rate: float = RATE) -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=rate)


def long(count: int = 240, **fields: Any) -> GenerateJob:
    return tokens(sampling=SamplingParams(max_new_tokens=count), **fields)


def piece(of: GenerateJob, ids: Sequence[int], *, version: int = 0, number: int = 0, start: int = 0) -> Piece:
    partial = Partial(start=start, token_ids=ids, logprobs=[-0.5] * len(ids), segments=(Segment(version, len(ids)),))
    return Piece(of.id, 1, 0, number, partial, streamed=True)


class Shown:
    """What somebody who only looks at deltas has of each sample."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.ids: dict[int, list[int]] = {}
        self.results: dict[int, RolloutResult] = {}

    def take(self, delta: Delta) -> None:
        self.deltas.append(delta)
        mine = self.ids.setdefault(delta.sample, [])
        if delta.restarted:
            mine.clear()
        assert delta.start == len(mine), "a gap, or an overlap"
        assert sum(segment.tokens for segment in delta.segments) == len(delta.token_ids)
        assert delta.logprobs is not None
        assert len(delta.logprobs) == len(delta.token_ids)
        assert delta.sample not in self.results, "a delta after the last one"
        mine += delta.token_ids.tolist()
        if delta.result is not None:
            self.results[delta.sample] = delta.result
            assert mine == delta.result.token_ids.tolist()

    async def all_of(self, deltas: AsyncIterator[Delta]) -> Shown:
        async for delta in deltas:
            self.take(delta)
        return self

    @property
    def restarts(self) -> int:
        return sum(delta.restarted for delta in self.deltas)


async def first(deltas: AsyncGenerator[Delta], at_least: int) -> Shown:
    """What was shown once a sample has so many tokens; the stream is left then."""
    shown = Shown()
    async with aclosing(deltas) as source:
        async for delta in source:
            shown.take(delta)
            if delta.start + len(delta.token_ids) >= at_least:
                return shown
    raise AssertionError("it ended before")


async def test_tokens_come_as_they_are_generated(redis_db: str, client: RolloutClient, db: Redis) -> None:
    async with worker(redis_db, engine=slow()):
        shown = await Shown().all_of(client.stream(long(n=2, metadata={"k": 1}), timeout=10))
    assert set(shown.results) == {0, 1}
    assert len(shown.deltas) > 4
    assert shown.restarts == 0
    for sample, result in shown.results.items():
        check_scripted(result, 3)
        assert result.metadata == {"k": 1}
        mine = [delta for delta in shown.deltas if delta.sample == sample]
        assert max(len(delta.token_ids) for delta in mine) < 200, "not all of it at once"
        assert np.allclose(np.concatenate([delta.logprobs for delta in mine]), result.logprobs)  # type: ignore[misc]
        assert [delta.result is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    assert client.outstanding == 0
    await client.aclose()
    assert await db.xlen("rmq:{default}:reply:client") == 0, "acknowledged like any result"


@pytest.mark.one_shard  # it looks into the news of one
async def test_results_come_once_and_as_ever(redis_db: str, client: RolloutClient, db: Redis) -> None:
    """Whoever does not look at the pieces has the same results, and nothing waits for him."""
    async with worker(redis_db, engine=slow()):
        waited = await client.submit(long(n=2, stream=True))
        assert len(await client.wait(waited, 10)) == 2
        await client.submit_many([long(stream=True), long()])
        outcomes = [outcome async for outcome in client.results(10)]
        assert len(outcomes) == 2
        await client.submit(long(n=2, stream=True, group_id="g"))
        assert [len(group.results) async for group in client.groups(10)] == [2]
    assert 0 < await db.xlen("rmq:{default}:news:client") < 600
    assert 0 < await db.ttl("rmq:{default}:news:client") <= 60


async def test_a_job_that_does_not_ask_is_told_of_nothing(redis_db: str, client: RolloutClient, db: Redis) -> None:
    async with worker(redis_db, engine=slow()):
        handle = await client.submit(long())
        await client.wait(handle, 10)
        shown = await Shown().all_of(client.stream(await client.submit(long()), timeout=10))
    assert len(shown.deltas) == 1, "its result"
    assert await db.exists("rmq:{default}:news:client") == 0


async def test_after_a_workers_death_the_next_goes_on_from_what_was_shown(redis_db: str, client: RolloutClient) -> None:
    shown, doomed = Shown(), slow(200.0)
    async with worker(redis_db, engine=doomed) as dying:
        deltas = client.stream(long(n=2), timeout=20)
        async for delta in deltas:
            shown.take(delta)
            if len(shown.ids.get(0, ())) > 20 and len(shown.ids.get(1, ())) > 20:
                break
        await dying.die()
        before = {sample: list(ids) for sample, ids in shown.ids.items()}
        async with worker(redis_db, engine=slow()) as heir:
            async for delta in deltas:
                shown.take(delta)
            assert {result.worker_id for result in shown.results.values()} == {heir.id}
    assert shown.restarts == 0
    for sample, result in shown.results.items():
        check_scripted(result, 3)
        assert result.attempt == 2
        assert result.token_ids.tolist()[: len(before[sample])] == before[sample]


async def test_a_drained_worker_hands_the_stream_on(redis_db: str, client: RolloutClient) -> None:
    shown = Shown()
    async with worker(redis_db, engine=slow(200.0), drain_s=0.0) as leaving:
        deltas = client.stream(long(), timeout=20)
        async for delta in deltas:
            shown.take(delta)
            if len(shown.ids[0]) > 20:
                break
        await leaving.stop()
        async with worker(redis_db, engine=slow()):
            await shown.all_of(deltas)
    assert shown.restarts == 0
    check_scripted(shown.results[0], 3)


async def test_a_sample_that_must_start_over_says_so(
    redis_db: str, client: RolloutClient, joined: Any, broker: Broker
) -> None:
    """Weights never go back within a sample: what a worker ahead of this one generated is worth nothing here."""
    ahead: Lease = await joined("ahead", features=("stream",))
    one = long()
    deltas = client.stream(one, timeout=20)
    shown = Shown()
    taking = asyncio.create_task(anext(deltas))
    await eventually(lambda: ahead.claim(1, 1, 7))
    await ahead.checkpoint([piece(one, [1, 2, 3], version=7)])
    shown.take(await taking)
    assert shown.ids[0] == [1, 2, 3]
    await ahead.release([Release(one.id, 1)], 3)
    async with worker(redis_db, engine=slow()):
        await shown.all_of(deltas)
    assert shown.restarts == 1
    check_scripted(shown.results[0], 3)
    assert shown.results[0].versions == (0,)


async def test_what_is_saved_anew_is_not_shown_again(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MOST_PIECES", 2)
    shown = Shown()
    async with worker(redis_db, engine=slow()) as running:
        async for delta in client.stream(long(10_000), timeout=60):
            shown.take(delta)
            if len(shown.deltas) == 4:
                hurry(running)
    assert shown.restarts == 0
    assert len(shown.deltas) > 3, "more than there are pieces at a time"
    check_scripted(shown.results[0], 3)


async def test_the_pieces_decide_not_the_news(
    redis_db: str, client: RolloutClient, joined: Any, broker: Broker, db: Redis
) -> None:
    """News may be lost. Pieces may be saved in other cuts, or be fewer than before."""
    one, shown = long(), Shown()
    deltas = client.stream(one, timeout=20)
    lease: Lease = await joined("w", features=("stream",))
    taking = asyncio.create_task(anext(deltas))
    await eventually(lambda: lease.claim(1, 1, 0))

    async def save(*pieces: Piece, lost: bool = False) -> None:
        await lease.checkpoint(pieces)
        if lost:
            await db.delete(broker.keys.news("client"))

    await save(piece(one, [1, 2]), piece(one, [3], number=1, start=2))
    shown.take(await taking)
    assert shown.ids[0] == [1, 2, 3]
    await save(piece(one, [1]), lost=True)
    await save(piece(one, [2, 3, 4], number=1, start=1), lost=True)
    shown.take(await anext(deltas))
    assert shown.ids[0] == [1, 2, 3, 4]
    await save(*[piece(one, [10 + i], number=2 + i, start=4 + i) for i in range(40)])
    while len(shown.ids[0]) < 44:
        shown.take(await anext(deltas))
    await save(piece(one, [1, 2, 9, 9, 9]))
    shown.take(await anext(deltas))
    assert shown.ids[0] == [1, 2, 9, 9, 9]
    assert shown.restarts == 1
    await client.cancel([one.id])
    with pytest.raises(JobFailed, match="cancelled"):
        await anext(deltas)


async def test_a_client_that_starts_again_sees_all_of_it(redis_db: str) -> None:
    one = long(400)
    async with worker(redis_db, engine=slow(200.0)):
        async with RolloutClient(redis_db, client_id="client") as before:
            await first(before.stream(one, timeout=10), 20)
        async with RolloutClient(redis_db, client_id="client") as after:
            handle = await after.submit(one)
            assert handle.state == "r"
            shown = await Shown().all_of(after.stream(handle, timeout=10))
            assert shown.deltas[0].start == 0
            assert len(shown.deltas[0].token_ids) >= 20
            check_scripted(shown.results[0], 3)


async def test_a_stream_that_was_left_can_be_taken_up(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db, engine=slow(200.0)):
        one = await client.submit(long(120, stream=True))
        await first(client.stream(one, timeout=10), 10)
        (result,) = await client.wait(one, 10)
        check_scripted(result, 3)


async def test_nothing_comes(client: RolloutClient) -> None:
    handle = await client.submit(long(stream=True))
    with pytest.raises(WaitTimeout):
        await anext(client.stream(handle, timeout=0.05))
    await client.cancel([handle])
    with pytest.raises(JobFailed, match="cancelled"):
        await anext(client.stream(handle, timeout=5))
    with pytest.raises(RolloutMQError, match="taken before"):
        await anext(client.stream(handle, timeout=5))


async def test_to_look_for_pieces_every_second_is_not_to_find_any(client: RolloutClient) -> None:
    with pytest.raises(WaitTimeout):
        async with asyncio.timeout(10):
            await anext(client.stream(long(), timeout=1.5))


async def test_its_outcomes_are_for_the_stream_alone(redis_db: str, client: RolloutClient) -> None:
    """Others of this client that take whatever comes do not take them; nor is one job streamed twice at a time."""
    async with worker(redis_db, engine=slow()):
        streamed = asyncio.create_task(Shown().all_of(client.stream(long(n=3, group_id="g"), timeout=10)))
        await eventually(lambda: client.outstanding)
        handles = await client.submit_many([long(n=2, group_id="g"), long(20)])
        outcomes = [outcome.job_id async for outcome in client.results(10)]
        assert sorted(outcomes) == sorted([handles[0].job_id] * 2 + [handles[1].job_id])
        assert set((await streamed).results) == {0, 1, 2}
        again = await client.submit(long(n=2, stream=True))  # the first delta may be the end of one sample, not of both
        source = client.stream(again, timeout=10)
        await anext(source)
        with pytest.raises(RolloutMQError, match="belongs to another call"):
            await anext(client.stream(again))
        await source.aclose()
        assert {outcome.job_id async for outcome in client.results(10)} == {again.job_id}


async def test_many_streams_at_once(redis_db: str, client: RolloutClient) -> None:
    async with worker(redis_db, engine=slow(), max_running=64):
        shown = await asyncio.gather(*(Shown().all_of(client.stream(long(n=2), timeout=10)) for _ in range(20)))
    assert all(len(one.results) == 2 and one.restarts == 0 and len(one.deltas) > 2 for one in shown)


async def test_closing_the_client_ends_its_streams(redis_db: str, serving: None) -> None:
    opened = RolloutClient(redis_db, client_id="other")
    await opened.open()
    handle = await opened.submit(job(reply_to="other", stream=True, min_version=9))
    waiting = asyncio.create_task(anext(opened.stream(handle)))
    await eventually(lambda: not waiting.done() and opened._streams._news._tasks)
    await opened.aclose()
    with pytest.raises(RolloutMQError, match="closed"):
        await waiting
