"""A trainer's feed on a real pool: groups by the staleness and the rules, and books that agree with what came."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.feeds import prompts
from support.pools.fixtures import MakeLease
from support.pools.pool import check_scripted, eventually, stream_length, worker
from support.specimens.messages import SHORT, result

from rolloutmq import (
    BlockingRolloutClient,
    GenerateJob,
    InvalidField,
    PoolBusy,
    RolloutClient,
    RolloutMQError,
    RolloutResult,
    Staleness,
    WaitTimeout,
)
from rolloutmq.messages import Broker, Caps, Finished, decode
from rolloutmq.producer.inbox import Crossing, under_way
from rolloutmq.producer.loop_thread import LoopThread
from rolloutmq.producer.training import GroupRules, RolloutFeed, TrainGroup, rewards_differ
from rolloutmq.worker.scripted.engine import ScriptedEngine

MARK2, MARK4 = (Staleness(eta=0, batch_size=size, on_stale="mark") for size in (2, 4))
"""For runs in which nobody publishes: all samples are of version 0."""


def in_full(feed: RolloutFeed) -> None:
    feed.books.check()
    report = feed.report()
    assert report["accepted"] == report["trained"] + sum(report["dropped"].values()) + report["in_flight"]


async def trained(feed: RolloutFeed, jobs: Iterator[GenerateJob], rewards: Any = None) -> list[TrainGroup]:
    """A whole training run; returns its groups."""
    groups: list[TrainGroup] = []
    async for batch in feed.batches(jobs, timeout=20):
        for group in batch:
            if rewards:
                group.rewards.extend(rewards(result) for result in group.results)
        groups += batch
        feed.train(batch)
        feed.advance(feed.books.version + 1)
        in_full(feed)
    return groups


async def test_a_run_trains_every_prompt_once(client: RolloutClient, serving: None, db: Redis, broker: Broker) -> None:
    feed = client.feed(Staleness(eta=1, batch_size=4, on_stale="mark"))  # nobody publishes here
    groups = await trained(feed, prompts(10), rewards=lambda result: float(result.sample))
    assert sorted(group.metadata["place"] for group in groups) == list(range(10))
    for group in groups:
        assert (group.n, group.samples, group.ok) == (2, (0, 1), True)
        assert group.prompt_ids.tolist() == [7, group.metadata["place"]]
        for one in group.results:
            check_scripted(one, 2)
    report = feed.report()
    assert (report["accepted"], report["trained"], report["in_flight"]) == (20, 20, 0)
    assert report["steps"] == dict.fromkeys(range(5), 4)
    assert report["rewards"]["trained"]["mean"] == 0.5
    assert report["lengths"]["trained"]["count"] == 20
    await eventually(lambda: stream_empty(db, broker), what="acknowledged: there is no checkpoint to go back to")


async def stream_empty(db: Redis, broker: Broker) -> bool:
    return await stream_length(db, broker) == 0


async def test_the_gate_opens_with_updates(client: RolloutClient, serving: None) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=4))
    for job in prompts(2):
        await feed.submit(job, 5)
    assert feed.capacity == 0
    (late,) = prompts(3, start=2)
    with pytest.raises(
        WaitTimeout, match=r"no room for 2 samples within 0.02 s: .* publish each one, and call advance\(\)"
    ):
        await feed.submit(late, 0.02)
    assert feed.books.numbers == 2, "not accepted"
    batch = await feed.batch(10)
    assert [group.number for group in batch] == [0, 1]
    with pytest.raises(WaitTimeout, match="0 prompts are under way, 2 groups are at the trainer, neither trained nor"):
        await anext(feed.batches([late], timeout=0.02))
    feed.train(batch)
    with pytest.raises(WaitTimeout, match=r"nothing was ready for the trainer within 0.02 s.*call advance\(\)"):
        await anext(feed.batches([late], timeout=0.02))
    waiting = asyncio.create_task(feed.submit(late, 10))
    await eventually(lambda: feed.books.marks["held up"] == 3)
    feed.advance(1)
    assert await waiting == 2
    in_full(feed)


async def test_jobs_carry_the_bound_to_the_workers(redis_db: str, client: RolloutClient, broker: Broker) -> None:
    feed = client.feed(Staleness(eta=2, batch_size=4, on_stale="wait"), version=0)
    await feed.submit(next(prompts(1)), 5)
    (job,) = (await broker.submitted(await broker.open_jobs("client"))).values()
    assert (job.max_staleness, job.min_version) == (2, 0)


@pytest.mark.parametrize("on_stale", ["drop", "mark"])
async def test_stale_samples_are_dropped_or_marked(client: RolloutClient, serving: None, on_stale: Any) -> None:
    feed = client.feed(Staleness(eta=1, batch_size=4, on_stale=on_stale))
    for job in prompts(4):
        await feed.submit(job, 5)
    await eventually(lambda: all_here(feed), what="all samples are here")
    first = await feed.batch(10)
    feed.train(first)
    feed.advance(1)
    feed.advance(2)
    batch = await feed.batch(10)
    in_full(feed)
    report = feed.report()
    if on_stale == "drop":
        assert batch == []
        assert (report["dropped"], report["lengths"]["stale"]["count"]) == ({"stale": 4}, 4)
    else:
        assert [group.staleness for group in batch] == [(2, 2), (2, 2)]
        assert report["marks"]["marked"] == 4


def all_here(feed: RolloutFeed) -> bool:
    return all(feed._core.inbox.tracked(it).ended for it in feed._core.inbox.known)  # type: ignore[union-attr]


async def test_wait_keeps_a_batch_until_what_is_due_is_here(redis_db: str, client: RolloutClient) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=2, on_stale="wait"))
    engine = ScriptedEngine(tokens_per_s=1e6)
    async with worker(redis_db, engine=engine, max_running=8):
        number = await feed.submit(next(prompts(1, n=1, sampling={"max_new_tokens": 4})), 5)
        slow = await feed.submit(next(prompts(1, n=1, sampling={"max_new_tokens": 400_000})), 5)
        batch = await feed.batch(20)
        assert [group.number for group in batch] == [number, slow]


async def test_failed_samples_cost_themselves_only(redis_db: str, client: RolloutClient) -> None:
    """A job that can never run takes its retries, and the rest of the batch is whole."""
    feed = client.feed(MARK4, GroupRules(retries=1))
    jobs = [*prompts(1), GenerateJob(text="no tokenizer here", n=2, sampling=SHORT)]
    async with worker(redis_db):
        async for batch in feed.batches(jobs, timeout=20):
            assert [group.number for group in batch] == [0]
            feed.train(batch)
    report = feed.report()
    assert (report["trained"], report["dropped"], report["in_flight"]) == (2, {"failed": 2}, 0)
    assert report["marks"]["asked again"] == 2
    in_full(feed)


@pytest.mark.parametrize("on_failed", ["ask", "less"])
async def test_a_group_loses_what_failed_and_no_more(
    redis_db: str, client: RolloutClient, joined: MakeLease, on_failed: Any
) -> None:
    """Two of three samples come, then the job is given up: the third is asked for again, or the group has two."""
    feed = client.feed(Staleness(eta=0, batch_size=3), GroupRules(on_failed=on_failed))
    await feed.submit(next(prompts(1, n=3)), 5)
    lease = await joined()
    (claim,) = await lease.claim(1, 1, 0)
    for sample in (0, 1):
        assert await lease.complete(
            [Finished(claim.job_id, 1, sample, result(decode(claim.payload, GenerateJob), sample))]
        ) == ["ok"]
    assert await lease.bury(claim.job_id, 1, "refused", "host", "no")
    await lease.leave()
    async with worker(redis_db):
        (group,) = await feed.batch(20)
    if on_failed == "ask":
        assert group.samples == (0, 1, 2)
        assert len({result.job_id for result in group.results}) == 2
    else:
        assert group.samples == (0, 1)
    assert len(group.failures) == 1
    feed.train([group])
    report = feed.report()
    assert (report["trained"], report["dropped"]) == ((3, {}) if on_failed == "ask" else (2, {"failed": 1}))
    in_full(feed)


async def test_over_sampling_keeps_the_first_and_drops_the_rest(client: RolloutClient, serving: None) -> None:
    feed = client.feed(MARK4, GroupRules(over_sample=2))
    groups = await trained(feed, prompts(4))
    assert [len(group.results) for group in groups] == [2, 2, 2, 2]
    report = feed.report()
    assert (report["accepted"], report["trained"], report["dropped"]) == (16, 8, {"surplus": 8})


@pytest.mark.parametrize("partials", [True, False])
async def test_stragglers_are_stopped(redis_db: str, client: RolloutClient, partials: bool) -> None:
    """One slot runs at a time, so when the first sample is there the second has only begun."""
    feed = client.feed(Staleness(eta=0, batch_size=1), GroupRules(over_sample=2, partials=partials))
    engine = ScriptedEngine(tokens_per_s=2_000.0)
    async with worker(redis_db, engine=engine, max_running=1):
        await feed.submit(next(prompts(1, n=1, sampling={"max_new_tokens": 400})), 5)
        (group,) = await feed.batch(20)
        assert group.results[0].finish_reason == "length"
        reasons = [result.finish_reason for result in group.results[1:]]
        assert reasons in ([[], ["abort"], ["abort", "abort"]] if partials else [[]])
        feed.train([group])
        assert feed.report()["in_flight"] == 0
        in_full(feed)
        await eventually(lambda: nothing_open(client), what="what is not needed does not run on")


async def nothing_open(client: RolloutClient) -> bool:
    return (await client.load()).open_jobs == 0


async def test_keep_decides_about_samples(client: RolloutClient, serving: None) -> None:
    feed = client.feed(MARK2, GroupRules(keep=lambda result: result.sample != 1))
    groups = await trained(feed, prompts(2))
    assert [group.samples for group in groups] == [(0,), (0,)]
    assert feed.report()["dropped"] == {"filtered": 2}


async def test_prompts_that_teach_nothing_are_replaced(client: RolloutClient, serving: None) -> None:
    def score(results: Sequence[RolloutResult]) -> list[float]:
        teaches = results[0].metadata["place"] % 2
        return [float(result.sample * teaches) for result in results]

    feed = client.feed(MARK4, GroupRules(score=score, teaches=rewards_differ))
    groups = await trained(feed, prompts(8))
    assert [group.metadata["place"] for group in groups] == [1, 3, 5, 7]
    assert all(group.rewards == [0.0, 1.0] for group in groups)
    report = feed.report()
    assert (report["trained"], report["dropped"]) == (8, {"filtered": 8})
    assert report["rewards"]["filtered"]["max"] == 0.0
    assert report["steps"] == {0: 4, 1: 4}, "batches are as large as ever"


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [([math.nan, math.nan], False), ([1.0, math.nan], False), ([0.0, math.nan, 1.0], True), ([], False)],
)
def test_no_reward_differs_from_none(rewards: list[float], differ: bool) -> None:
    assert rewards_differ(rewards) == differ


async def test_filters_are_bounded(client: RolloutClient, serving: None) -> None:
    async def score(results: Sequence[RolloutResult]) -> list[float]:
        return [0.0] * len(results)

    feed = client.feed(MARK2, GroupRules(score=score, teaches=rewards_differ, most_filtered=3))
    groups = await trained(feed, prompts(8))
    assert len(groups) == 2
    assert (feed.report()["marks"]["let through"], feed.report()["dropped"]) == (4, {"filtered": 12})


async def test_results_that_wait_for_a_checkpoint_fill_the_pool_and_the_error_says_so(
    redis_db: str, serving: None
) -> None:
    async with RolloutClient(redis_db, client_id="client", caps=Caps(unread=2_000)) as client:
        feed = client.feed(MARK4)

        async def run_without_saving() -> None:
            async for batch in feed.batches(prompts(1000), timeout=20):
                feed.train(batch)
                feed.advance(feed.books.version + 1)
                feed.state_dict()

        with pytest.raises(PoolBusy, match=r"bytes wait for a checkpoint; save one and call saved\(\)") as raised:
            await run_without_saving()
        assert raised.value.reason == "unread"
        in_full(feed)
        trained_before = feed.books.trained
        feed.saved()
        assert await feed.submit(next(prompts(1)), 10) == feed.books.numbers - 1
        feed.train(await feed.batch(20))
        assert feed.books.trained == trained_before + 2


async def test_a_filter_that_raises_loses_nothing(client: RolloutClient, serving: None) -> None:
    broken = True

    def keep(result: RolloutResult) -> bool:
        if broken:
            raise ValueError("no judge")
        return True

    feed = client.feed(MARK4, GroupRules(keep=keep))
    loop = feed.batches(prompts(2), timeout=20)
    with pytest.raises(ValueError, match="no judge"):
        await anext(loop)
    broken = False
    batch = await anext(loop)
    assert [group.samples for group in batch] == [(0, 1), (0, 1)]
    feed.train(batch)
    in_full(feed)


async def test_a_scorer_that_raises_loses_nothing(client: RolloutClient, serving: None) -> None:
    broken = True

    def score(results: Sequence[RolloutResult]) -> list[float]:
        if broken:
            raise ValueError("no judge")
        return [1.0] * len(results)

    feed = client.feed(MARK4, GroupRules(score=score))
    loop = feed.batches(prompts(2), timeout=20)
    with pytest.raises(ValueError, match="no judge"):
        await anext(loop)
    in_full(feed)
    broken = False
    assert [group.rewards for group in await anext(loop)] == [[1.0, 1.0], [1.0, 1.0]]


async def test_a_loop_goes_on_after_a_timeout(redis_db: str, client: RolloutClient) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=4))
    loop = feed.batches(prompts(2), timeout=0.05)
    with pytest.raises(WaitTimeout):
        await anext(loop)
    async with worker(redis_db):
        loop._timeout = 20.0  # type: ignore[attr-defined]
        assert len(await anext(loop)) == 2


async def test_what_does_not_fit_is_refused(client: RolloutClient, serving: None) -> None:
    feed = client.feed(Staleness(eta=1, batch_size=2))
    with pytest.raises(InvalidField, match=r"n=5: at most \(eta \+ 1\) x batch_size = 4"):
        await feed.submit(next(prompts(1, n=5)))
    with pytest.raises(RolloutMQError, match="has a feed already"):
        client.feed(Staleness(eta=1, batch_size=2))
    await feed.submit(next(prompts(1)), 5)
    (group,) = await feed.batch(10)
    group.rewards.append(1.0)
    with pytest.raises(InvalidField, match="one for each of 2 results"):
        feed.train([group])
    group.rewards.append(1.0)
    feed.train([group])
    with pytest.raises(InvalidField, match="groups that the trainer has, each once"):
        feed.train([group])
    with pytest.raises(InvalidField, match=r"teaches=.*only together with score"):
        GroupRules(teaches=rewards_differ)
    in_full(feed)


async def test_other_calls_do_not_get_a_feeds_samples(client: RolloutClient, serving: None) -> None:
    feed = client.feed(Staleness(eta=0, batch_size=2))
    await feed.submit(next(prompts(1)), 5)
    assert [outcome async for outcome in client.results(timeout=10)] == []
    (group,) = await feed.batch(10)
    assert len(group.results) == 2


def test_a_plain_loop_does_the_same(redis_db: str) -> None:
    with BlockingRolloutClient(redis_db, client_id="client") as client, serving_thread(redis_db):
        feed = client.feed(MARK4, GroupRules(score=lambda results: [1.0] * len(results)))
        places = set()
        for batch in feed.batches(prompts(6), timeout=20):
            places |= {group.metadata["place"] for group in batch}
            feed.train(batch)
            feed.advance(feed.books.version + 1)
            state = feed.state_dict()
            feed.saved(state)
        assert places == set(range(6))
        assert feed.report()["trained"] == 12
        assert feed.capacity == 4


@contextlib.contextmanager
def serving_thread(url: str) -> Iterator[None]:
    """A worker on an event loop of its own."""
    thread = LoopThread("the worker")
    context = worker(url)
    thread.run(context.__aenter__())
    try:
        yield
    finally:
        thread.run(context.__aexit__(None, None, None))
        thread.close()


async def test_what_a_plain_loop_did_not_get_is_ready_again(client: RolloutClient, serving: None) -> None:
    """Ctrl-C comes while a batch is on its way to the thread that waits for it."""
    feed = client.feed(MARK4)
    for job in prompts(2):
        await feed.submit(job, 5)
    crossing = Crossing()
    token = under_way.set(crossing)
    lost = await feed.batch(10)
    under_way.reset(token)
    crossing.lose()
    assert [group.number for group in await feed.batch(10)] == [group.number for group in lost] == [0, 1]
