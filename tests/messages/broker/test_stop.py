"""Jobs asked to end with what they have: wherever they are, every sample comes out once, and nothing is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support.pools.pool import check_scripted, eventually, runs, worker
from support.specimens.byte_tokenizer import Bytes
from support.specimens.messages import job, result

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Finished, Lease, Partial, Piece, Release, SamplingParams, Segment
from rolloutmq.messages.errors import WaitTimeout
from rolloutmq.worker.generation import Generation
from rolloutmq.worker.jobs.sample import SampleRun
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = SamplingParams(max_new_tokens=100_000)
Joined = Callable[..., Awaitable[Lease]]


@pytest.fixture
async def client(redis_db: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_db, client_id="client") as opened:
        yield opened


async def results(client: RolloutClient) -> list[Any]:
    return [outcome async for outcome in client.results(timeout=20)]


async def test_running_samples_come_out_with_what_they_have(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(tokens_per_s=2000)
    async with worker(redis_db, engine=engine, max_running=4) as running:
        handle = await client.submit(job(n=3, sampling=LONG, reply_to=""))
        await eventually(lambda: [count > 20 for count in running.sampled] == [True] * 3)
        assert await client.stop([handle]) == 1
        found = await results(client)
    assert sorted(one.sample for one in found) == [0, 1, 2]
    for one in found:
        assert one.finish_reason == "abort"
        assert 20 < len(one.token_ids) < LONG.max_new_tokens
        check_scripted(one, 3)
    assert await client.stop([handle]) == 0


async def test_samples_that_wait_for_a_slot_come_out_empty(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(tokens_per_s=2000)
    async with worker(redis_db, engine=engine, max_running=1, prefetch=0):
        handle = await client.submit(job(n=3, sampling=LONG, reply_to=""))
        await eventually(engine.ops.generated)
        await client.stop([handle])
        found = await results(client)
    assert sorted(len(one.token_ids) > 0 for one in found) == [False, False, True]
    assert {one.finish_reason for one in found} == {"abort"}
    assert all(one.segments == () for one in found if not len(one.token_ids))


async def test_what_nobody_has_begun_is_cancelled(client: RolloutClient) -> None:
    handles = await client.submit_many([job(reply_to=""), job(reply_to="")])
    assert await client.stop([handles[0]]) == 1
    first = await anext(client.results(timeout=5))
    assert (first.job_id, first.outcome) == (handles[0].job_id, "cancelled")
    assert (await client.broker.load()).open_jobs == 1


async def test_the_others_are_not_touched(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(tokens_per_s=500)
    async with worker(redis_db, engine=engine):
        stays = await client.submit(job(sampling=SamplingParams(max_new_tokens=100), reply_to=""))
        goes = await client.submit(job(sampling=LONG, reply_to=""))
        await eventually(lambda: runs(engine, 2))
        await client.stop([goes])
        found = {one.job_id: one for one in await results(client)}
    assert found[stays.job_id].finish_reason == "length"
    assert found[goes.job_id].finish_reason == "abort"


def piece(of: str, attempt: int) -> Piece:
    saved = Partial(token_ids=[5, 6], logprobs=[-0.5, -1.0], segments=(Segment(0, 2),))
    return Piece(of, attempt, 0, 0, saved)


@pytest.mark.parametrize("queued_when_stopped", [True, False])
async def test_what_a_lost_worker_had_saved_is_handed_over_and_nothing_more(
    redis_db: str, client: RolloutClient, broker: Broker, joined: Joined, queued_when_stopped: bool
) -> None:
    """The worker lets go before or after the job is stopped; who claims it next only publishes."""
    handle = await client.submit(job(n=2, sampling=LONG, reply_to=""))
    lease = await joined()
    (claim,) = await lease.claim(1, 10, 0)
    back = Release(claim.job_id, claim.attempt, (piece(claim.job_id, claim.attempt),))
    if queued_when_stopped:
        await lease.release([back], 3)
    assert await broker.stop([handle.job_id]) == ["ok"]
    if not queued_when_stopped:
        await lease.release([back], 3)
    await lease.leave()
    engine = ScriptedEngine(tokens_per_s=1)
    async with worker(redis_db, engine=engine):
        found = {one.sample: one for one in await results(client)}
    assert [found[i].token_ids.tolist() for i in (0, 1)] == [[5, 6], []]
    np.testing.assert_array_equal(found[0].logprobs, np.float32([-0.5, -1.0]))
    assert {one.finish_reason for one in found.values()} == {"abort"}


async def test_it_does_not_wait_for_newer_weights(redis_db: str, client: RolloutClient, joined: Joined) -> None:
    """A job with something saved that no worker could go on with, because it asks for a version that nobody has."""
    handle = await client.submit(job(sampling=LONG, reply_to="", min_version=5))
    ahead = await joined("ahead")
    (claim,) = await ahead.claim(1, 10, 5)
    saved = Partial(token_ids=[5], logprobs=[-0.5], segments=(Segment(5, 1),))
    await ahead.release([Release(claim.job_id, claim.attempt, (Piece(claim.job_id, claim.attempt, 0, 0, saved),))], 3)
    assert await (await joined("behind")).claim(1, 10, 0) == []
    assert await client.broker.stop([handle.job_id]) == ["ok"]
    async with worker(redis_db):
        (one,) = await results(client)
    assert (one.finish_reason, one.token_ids.tolist(), one.versions) == ("abort", [5], (5,))


async def test_a_worker_that_missed_the_bell_is_told_again(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(tokens_per_s=500)
    async with worker(redis_db, engine=engine) as running:
        handle = await client.submit(job(sampling=LONG, reply_to=""))
        await eventually(lambda: runs(engine, 1))
        heard: list[Any] = []
        original = running.generation.end
        monkeypatch.setattr(
            running.generation, "end", lambda samples: heard.append(1) or (len(heard) > 2 and original(samples))
        )
        assert await client.stop([handle]) == 1
        assert len(heard) > 2
        (one,) = await results(client)
    assert one.finish_reason == "abort"


async def test_without_anybody_to_end_it_the_wait_is_bounded(client: RolloutClient, joined: Joined) -> None:
    handle = await client.submit(job(sampling=LONG, reply_to=""))
    assert len(await (await joined()).claim(1, 10, 0)) == 1
    with pytest.raises(WaitTimeout, match="1 of 1 jobs"):
        await client.stop([handle], timeout=0.05)


async def test_again_and_for_what_nobody_knows(client: RolloutClient, broker: Broker) -> None:
    handle = await client.submit(job(reply_to=""))
    assert await broker.stop([handle.job_id, "0" * 32]) == ["unbegun", "unknown"]
    assert await broker.stop([handle.job_id]) == ["cancelled"]
    assert await client.stop([handle]) == 0


async def test_what_is_published_counts_as_begun(client: RolloutClient, broker: Broker, joined: Joined) -> None:
    """Of two samples one is out, and nothing is saved of the other: it comes out empty, and the job is done."""
    one = job(n=2, sampling=LONG)
    handle = await client.submit(one)
    lease = await joined()
    (claim,) = await lease.claim(1, 10, 0)
    assert await lease.complete([Finished(one.id, claim.attempt, 0, result(one))]) == ["ok"]
    await lease.release([Release(one.id, claim.attempt)], 3)
    assert await broker.stop([handle.job_id]) == ["ok"]
    (again,) = await lease.claim(1, 10, 0)
    assert (again.ending, again.published) == (True, {0})


async def test_nor_does_one_on_its_last_chance(client: RolloutClient, broker: Broker, joined: Joined) -> None:
    one = job(sampling=LONG, min_version=5)
    await client.submit(one)
    ahead = await joined("ahead")
    (claim,) = await ahead.claim(1, 10, 5)
    await ahead.release([Release(one.id, claim.attempt, (piece(one.id, claim.attempt),), lost=True)], 2)
    assert await broker.stop([one.id]) == ["ok"]
    (ended,) = await (await joined("behind")).claim(1, 10, 0)
    assert (ended.job_id, ended.ending) == (one.id, True)


async def test_nor_for_an_adapter(redis_db: str, client: RolloutClient, joined: Joined) -> None:
    """The only worker left has not the adapter that a job was sampled with, and needs it no more."""
    for part in client.broker.parts:
        await part.redis.hset(part.keys.weights, mapping={"adapter:tone": 3, "number:tone": 1, "adapters": 1})
    one = job(sampling=LONG, lora="tone")
    await client.submit(one)
    ahead = await joined("ahead", features=("lora",))
    (claim,) = await ahead.claim(1, 10, 0, {"tone": 3})
    saved = Partial(token_ids=[5], logprobs=[-0.5], segments=(Segment(0, 1),), adapter_segments=(Segment(3, 1),))
    await ahead.release([Release(one.id, claim.attempt, (Piece(one.id, claim.attempt, 0, 0, saved),))], 3)
    await ahead.leave()
    assert await client.broker.stop([one.id]) == ["ok"]
    async with worker(redis_db):
        (found,) = await results(client)
    assert (found.finish_reason, found.token_ids.tolist(), found.attempt) == ("abort", [5], 2)
    assert (found.adapter, found.adapter_version, found.adapter_segments) == ("tone", 3, (Segment(3, 1),))


class Stuck(Bytes):
    """A tokenizer that does not like what it is to decode."""

    def decode(self, token_ids: Any, *, special: bool = False) -> str:
        raise ValueError("what is this?")


async def test_a_result_that_cannot_be_made_ends_its_job_and_nothing_else(redis_db: str, client: RolloutClient) -> None:
    engine = ScriptedEngine(tokens_per_s=500)
    async with worker(redis_db, engine=engine, tokenizer=Stuck(), max_running=1, prefetch=0) as running:
        handle = await client.submit(text="abc", n=3, sampling=LONG)
        await eventually(lambda: runs(engine))
        joined_as = running.id
        await client.stop([handle])
        (failure,) = await results(client)
        assert (failure.outcome, "what is this?" in failure.error) == ("dead", True)
        await client.wait(await client.submit(token_ids=[1]), 10)
        assert running.id == joined_as


def test_samples_are_told_apart_by_what_they_are() -> None:
    """A job that was handed back and claimed again: what is left of its first time here looks the same."""
    ended: list[Any] = []
    idle = Generation(ScriptedEngine(), 1, on_finished=ended.append, on_refused=print, on_failed=print, on_dead=print)
    idle.gate.holder("test").acquire()
    of = job()
    left, again = (SampleRun(of.model_copy(), np.array([1, 2, 3], np.int32), 0, 1, 0.0) for _ in range(2))
    for one in (left, again):
        idle.add([one])
    left.dropped = True
    again.saved_at = left.saved_at
    idle.end([again])
    assert [one is again for one in ended] == [True]
