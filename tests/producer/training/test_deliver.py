"""Samples that the feed delivers as they finish: none waits for its group, and the books have each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.pools.feeds import in_full
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually
from support.specimens.messages import SHORT, result

from rolloutmq import GenerateJob, InvalidField, RolloutClient, Segment, Staleness, WaitTimeout
from rolloutmq.messages import Broker, Finished, decode
from rolloutmq.producer.training import GroupRules, rewards_differ

ONE_BY_ONE = GroupRules(deliver="samples")


def prompt(n: int, place: int = 0) -> GenerateJob:
    return GenerateJob(token_ids=[7, place], n=n, sampling=SHORT, metadata={"place": place})


class Worker:
    """Holds the jobs of a pool and ends their samples one by one, as a test says."""

    def __init__(self, lease: Any, claims: Sequence[Any]) -> None:
        self._lease = lease
        self._claims = {decode(it.payload, GenerateJob).metadata["place"]: it for it in claims}

    async def end(self, place: int, *samples: int, **fields: Any) -> None:
        claim = self._claims[place]
        job = decode(claim.payload, GenerateJob)
        done = [Finished(claim.job_id, 1, sample, result(job, sample, **fields)) for sample in samples]
        assert await self._lease.complete(done) == ["ok"] * len(done)


async def held(joined: MakeLease, jobs: int, samples: int, version: int = 0) -> Worker:
    lease = await joined(f"w{version}", 600.0)
    claims = await lease.claim(jobs, samples, version)
    assert len(claims) == jobs
    return Worker(lease, claims)


async def test_a_sample_does_not_wait_for_its_group(client: RolloutClient, joined: MakeLease) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=3), ONE_BY_ONE)
    await feed.submit(prompt(3), 5)
    worker = await held(joined, 1, 3)
    await worker.end(0, 1)
    first = await feed.take(60)
    assert (first.number, first.samples, first.n) == (0, (1,), 1)
    feed.train([first])
    in_full(feed, 1, 2)
    with pytest.raises(InvalidField, match="each once"):
        feed.train([first])
    with pytest.raises(WaitTimeout):
        await feed.take(0.02)
    await worker.end(0, 2, 0)
    second, third = await feed.take(60), await feed.take(60)
    assert {second.samples, third.samples} == {(0,), (2,)}
    feed.drop([third])
    feed.train([second])
    in_full(feed, 2, 0, filtered=1)


async def test_a_batch_is_filled_from_several_prompts_to_the_sample(client: RolloutClient, joined: MakeLease) -> None:
    """A straggler in each group holds up none of the others, and what a batch leaves is in the next one."""
    feed = client.feed(Staleness(eta=1, batch_size=3), ONE_BY_ONE)
    for place in (0, 1):
        await feed.submit(prompt(3, place), 5)
    worker = await held(joined, 2, 6)
    await worker.end(0, 2, 0)
    await worker.end(1, 0, 2)
    batch = await feed.batch(60)
    assert [(it.number, it.samples) for it in batch] == [(0, (0, 2)), (1, (0,))]
    feed.train(batch)
    in_full(feed, 3, 3)
    await worker.end(0, 1)
    await worker.end(1, 1)
    last = await feed.batch(60)
    assert [(it.number, it.samples) for it in last] == [(0, (1,)), (1, (1, 2))]
    feed.train(last)
    in_full(feed, 6, 0)


async def test_the_first_of_more_are_delivered_and_no_others(client: RolloutClient, joined: MakeLease) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=2), GroupRules(deliver="samples", over_sample=2))
    await feed.submit(prompt(2), 5)
    worker = await held(joined, 1, 4)
    await worker.end(0, 3)
    first = await feed.take(60)
    feed.train([first])
    assert feed.capacity == 0, "one more is wanted, however many are asked for"
    await worker.end(0, 1, 2)
    second = await feed.take(60)
    assert (first.samples, second.samples) == ((3,), (1,))
    feed.train([second])
    in_full(feed, 2, 0, surplus=2)


async def test_stale_samples_do_not_take_their_groups_fresh_ones_along(
    client: RolloutClient, joined: MakeLease
) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=2), ONE_BY_ONE)
    await feed.submit(prompt(2), 5)
    worker = await held(joined, 1, 2)
    await worker.end(0, 0)
    feed.train([await feed.take(60)])
    feed.advance(1)
    await worker.end(0, 1)  # of version 0, as the other one was

    async def dropped() -> int:
        with pytest.raises(WaitTimeout):
            await feed.take(0.02)
        return feed.books.dropped["stale"]

    await eventually(dropped)
    in_full(feed, 1, 0, stale=1)


async def test_wait_counts_samples_and_not_groups(client: RolloutClient, joined: MakeLease) -> None:
    """A straggler is waited for when it would be stale otherwise; its group's other sample was trained before."""
    feed = client.feed(Staleness(eta=1, batch_size=2, on_stale="wait"), ONE_BY_ONE)
    for place in (0, 1):
        await feed.submit(prompt(2, place), 5)
    worker = await held(joined, 2, 4)
    await worker.end(0, 0)
    await worker.end(1, 0)
    batch = await feed.batch(60)
    assert [(it.number, it.samples) for it in batch] == [(0, (0,)), (1, (0,))]
    feed.train(batch)
    feed.advance(1)
    await feed.submit(prompt(2, 2), 5)
    younger = await held(joined, 1, 2, version=1)
    await younger.end(2, 0, 1)

    async def waited() -> int:
        with pytest.raises(WaitTimeout):
            await feed.batch(0.02)
        return feed.books.marks["waited"]

    await eventually(waited)
    await worker.end(0, 1)
    await worker.end(1, 1)
    assert [(it.number, it.samples) for it in await feed.batch(60)] == [(0, (1,)), (1, (1,))]


async def test_an_adapters_samples_are_as_old_as_the_adapter(client: RolloutClient, joined: MakeLease) -> None:
    """Its base model stays the same version all the time."""
    feed = client.feed(Staleness(eta=0, batch_size=1, on_stale="mark"), version=5)
    await feed.submit(prompt(1), 5)
    worker = await held(joined, 1, 1)
    sampled = {"adapter": "tutor", "adapter_version": 6, "adapter_segments": (Segment(6, 2),)}
    feed.advance(6)
    await worker.end(0, 0, **sampled)
    assert (await feed.take(60)).staleness == (0,)
    feed.books.check()


async def test_a_restored_trainer_gets_the_samples_that_it_was_not_trained_on(
    redis_db: str, broker: Broker, joined: MakeLease
) -> None:
    rules = GroupRules(deliver="samples", over_sample=1)
    async with RolloutClient(redis_db, client_id="client") as client:
        feed = client.feed(Staleness(eta=0, batch_size=3), rules)
        await feed.submit(prompt(3), 5)
        worker = await held(joined, 1, 4)
        await worker.end(0, 2)
        feed.train([await feed.take(60)])
        state = feed.state_dict()
        feed.saved(state)
        await worker.end(0, 0)
        assert (await feed.take(60)).samples == (0,)
    async with RolloutClient(redis_db, client_id="client") as client:
        feed = client.feed(Staleness(eta=0, batch_size=3), rules)
        feed.load_state_dict(state)
        assert (await feed.take(60)).samples == (0,), "it was at the trainer when that died"
        await worker.end(0, 3, 1)
        rest = await feed.take(60)
        in_full(feed, 1, 2, surplus=1)
        assert rest.samples in {(3,), (1,)}


async def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidField, match="deliver='now'"):
        GroupRules(deliver="now")  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="complete groups"):
        GroupRules(deliver="samples", score=lambda results: [0.0] * len(results), teaches=rewards_differ)
