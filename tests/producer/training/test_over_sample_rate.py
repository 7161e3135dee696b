"""A batch that is given when enough of it is ready: the rest is stopped or goes on, and the books have all of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.pools.feeds import in_full, prompts
from support.pools.fixtures import MakeLease
from support.pools.pool import eventually, runs, worker
from support.specimens.messages import result

from rolloutmq import GenerateJob, InvalidField, RolloutClient, Staleness
from rolloutmq.messages import Broker, Finished, decode
from rolloutmq.producer.training import Books, GroupRules
from rolloutmq.worker.scripted.engine import ScriptedEngine

SLOW = {"max_new_tokens": 400_000}


class Held:
    """Jobs at a worker that ends them as a test says: by the place of their prompts."""

    def __init__(self, lease: Any) -> None:
        self._lease, self._claims = lease, {}

    async def claim(self, count: int, samples: int, version: int = 0) -> None:
        claims = await self._lease.claim(count, samples, version)
        self._claims |= {decode(it.payload, GenerateJob).metadata["place"]: it for it in claims}

    async def end(self, place: int, *samples: int) -> None:
        claim = self._claims[place]
        job = decode(claim.payload, GenerateJob)
        done = [Finished(claim.job_id, 1, it, result(job, it)) for it in samples]
        assert await self._lease.complete(done) == ["ok"] * len(done)


@pytest.fixture
async def held(joined: MakeLease) -> Held:
    return Held(await joined("w", 600.0))


def some_slow(count: int, slow: int) -> Iterator[GenerateJob]:
    """The first `slow` of each hundred never end by themselves in a test's time."""
    for job in prompts(count, n=1):
        late = job.metadata["place"] % 100 < slow
        yield job.model_copy(update={"sampling": job.sampling.model_copy(update=SLOW)}) if late else job


async def test_a_batch_of_100_is_given_with_90_and_the_other_10_are_stopped(
    redis_db: str, client: RolloutClient
) -> None:
    """Each step anew: what one batch did without gives the next one no more room than it has."""
    feed = client.feed(Staleness(eta=0, batch_size=100, on_stale="mark"), GroupRules(over_sample_rate=0.1))
    engine = ScriptedEngine(tokens_per_s=2_000.0)
    batches = feed.batches(some_slow(300, 10), timeout=60)
    async with worker(redis_db, engine=engine, max_running=100):
        for step in range(3):
            batch = await anext(batches)
            assert [group.metadata["place"] for group in batch] == [*range(100 * step + 10, 100 * step + 100)]
            assert all(group.ok for group in batch)
            assert feed.capacity == 0, "what was stopped makes room for nobody before the update"
            feed.train(batch)
            await eventually(lambda: runs(engine, 0), what="what is not needed does not run on")
            in_full(feed, 90 * (step + 1), 0, surplus=10 * (step + 1))
            feed.advance(step + 1)
        assert [batch async for batch in batches] == []
    assert feed.report()["marks"]["left out"] == 30
    assert (await client.load()).open_jobs == 0


async def test_samples_count_one_by_one_where_they_are_delivered_so(client: RolloutClient, held: Held) -> None:
    """As in VERL, where requests are samples: a prompt loses the one that is late, and keeps the others."""
    rules = GroupRules(deliver="samples", over_sample_rate=0.25)
    feed = client.feed(Staleness(eta=0, batch_size=4), rules)
    for job in prompts(2):
        await feed.submit(job, 5)
    await held.claim(2, 4)
    await held.end(0, 1)
    await held.end(1, 0, 1)
    batch = await feed.batch(60)
    assert [(it.number, it.samples) for it in batch] == [(0, (1,)), (1, (0, 1))]
    feed.train(batch)
    in_full(feed, 3, 0, surplus=1)


async def test_what_is_young_enough_goes_on_and_is_in_a_later_batch(client: RolloutClient, held: Held) -> None:
    """With eta=1 a prompt may be late for one batch. When it would be too old for the next, it is stopped."""
    feed = client.feed(Staleness(eta=1, batch_size=2, on_stale="wait"), GroupRules(over_sample_rate=0.5))
    for job in prompts(4, n=1):
        await feed.submit(job, 5)
    await held.claim(4, 4)
    await held.end(3, 0)
    first = await feed.batch(60)
    assert [it.number for it in first] == [3]
    in_full(feed, 0, 4)
    feed.train(first)
    feed.advance(1)
    await held.end(1, 0)
    second = await feed.batch(60)
    assert [it.number for it in second] == [1], "it was carried over"
    feed.train(second)
    in_full(feed, 2, 0, surplus=2)


async def test_the_samples_of_an_unfinished_group_are_accounted_for_with_their_lengths(
    client: RolloutClient, held: Held, broker: Broker
) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=4), GroupRules(over_sample_rate=0.5))
    for job in prompts(2):
        await feed.submit(job, 5)
    await held.claim(2, 4)
    await held.end(0, 0)
    await held.end(1, 0, 1)
    (group,) = await feed.batch(60)
    feed.train([group])
    in_full(feed, 2, 0, surplus=2)
    assert feed.report()["lengths"]["surplus"]["count"] == 1, "the other one has no length yet"
    restored = Books()
    restored.load_state_dict(feed.state_dict()["books"])
    assert restored.marks["left out"] == 2
    await eventually(lambda: nothing_open(client), what="it is cancelled, though nobody asks the feed again")


async def nothing_open(client: RolloutClient) -> bool:
    return (await client.load()).open_jobs == 0


async def test_a_single_group_is_taken_whatever_the_rate(client: RolloutClient, held: Held) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=2), GroupRules(over_sample_rate=0.5))
    for job in prompts(2, n=1):
        await feed.submit(job, 5)
    await held.claim(2, 2)
    await held.end(1, 0)
    assert (await feed.take(60)).number == 1
    in_full(feed, 0, 2)


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5, True, "0.1", float("nan"), None])
def test_rates_that_leave_nothing_are_refused(rate: Any) -> None:
    with pytest.raises(InvalidField, match=r"over_sample_rate=.*at least 0 and below 1"):
        GroupRules(over_sample_rate=rate)


@pytest.mark.parametrize(
    ("rate", "most", "enough"), [(0, 8, 8), (0.1, 100, 90), (0.1, 7, 6), (0.9, 10, 1), (0.99, 3, 1)]
)
def test_how_many_are_enough(rate: float, most: int, enough: int) -> None:
    assert GroupRules(over_sample_rate=rate).enough(most) == enough
