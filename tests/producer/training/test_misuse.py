"""A feed that is used in ways nobody recommends: wrong types, several tasks at once, data that raises."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from support.pools.feeds import prompts
from support.pools.pool import eventually

from rolloutmq import GenerateJob, InvalidField, RolloutClient, Staleness
from rolloutmq.producer.training import RolloutFeed


def marking(client: RolloutClient, eta: int, size: int) -> RolloutFeed:
    """Nobody publishes here: all samples are of version 0."""
    return client.feed(Staleness(eta, size, on_stale="mark"))


async def test_several_tasks_share_a_loop(client: RolloutClient, serving: None) -> None:
    feed = marking(client, eta=1, size=4)
    loop = feed.batches(prompts(20), timeout=20)
    places: list[int] = []

    async def train() -> None:
        async for batch in loop:
            places.extend(group.metadata["place"] for group in batch)
            feed.train(batch)
            feed.advance(feed.books.version + 1)

    await asyncio.gather(train(), train(), train())
    assert sorted(places) == list(range(20)), "each prompt once"


async def test_the_staleness_holds_for_submit_beside_a_loop(client: RolloutClient, serving: None) -> None:
    feed = marking(client, eta=0, size=4)
    loop = feed.batches(prompts(40), timeout=20)
    others = asyncio.gather(*(feed.submit(job, 20) for job in prompts(20)))
    for step in range(30):
        batch = await anext(loop)
        assert feed.books.live <= (step + 1) * 4
        feed.train(batch)
        feed.advance(step + 1)
    await others
    feed.books.check()


async def test_a_submission_that_waits_for_room_does_not_hold_up_the_loop(client: RolloutClient, serving: None) -> None:
    feed = marking(client, eta=0, size=8)
    await feed.submit(next(prompts(1, n=4)), 5)
    large = asyncio.create_task(feed.submit(next(prompts(1, n=8)), None))
    await eventually(lambda: feed.books.marks["held up"] == 1)
    batch = await anext(feed.batches(prompts(2, n=2), timeout=20))
    assert [group.n for group in batch] == [4, 2, 2]
    feed.train(batch)
    feed.advance(1)
    assert await asyncio.wait_for(large, 20) == 3


async def test_data_that_raises_loses_and_repeats_nothing(client: RolloutClient, serving: None) -> None:
    class Data:
        def __init__(self) -> None:
            self.jobs, self.broken = prompts(4), True

        def __iter__(self) -> Data:
            return self

        def __next__(self) -> GenerateJob:
            job = next(self.jobs)
            if job.metadata["place"] == 2 and self.broken:
                self.jobs, self.broken = iter([job, *self.jobs]), False
                raise OSError("the disk is slow")
            return job

    feed = marking(client, eta=3, size=4)
    loop = feed.batches(Data(), timeout=20)
    with pytest.raises(OSError, match="slow"):
        await anext(loop)
    places: list[int] = []
    async for batch in loop:
        places += [group.metadata["place"] for group in batch]
        feed.train(batch)
        feed.advance(feed.books.version + 1)
    assert places == [0, 1, 2, 3]


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_checkpoint_of_another_client_is_refused_when_it_is_loaded(redis_db: str, in_flight: bool) -> None:
    async with RolloutClient(redis_db, client_id="a") as one, RolloutClient(redis_db, client_id="b") as other:
        feed = marking(one, eta=3, size=4)
        if in_flight:
            await feed.submit(next(prompts(1)), 5)
        mine = marking(other, eta=3, size=4)
        state = feed.state_dict()
        for _ in range(2):
            with pytest.raises(InvalidField, match=r"state\.client_id='a': 'b'"):
                mine.load_state_dict(state)
        assert mine.books.numbers == 0
        del state["client_id"]  # an older release made it
        if in_flight:
            with pytest.raises(InvalidField, match=r"state\.prompts='prompt 0'.*another client made this"):
                mine.load_state_dict(state)


async def test_a_damaged_checkpoint_is_told_from_another_clients(redis_db: str) -> None:
    async with RolloutClient(redis_db, client_id="a") as client:
        feed, restored = (marking(one, eta=3, size=4) for one in (client, RolloutClient(redis_db, client_id="a")))
        await feed.submit(next(prompts(1)), 5)
        state = feed.state_dict()
        for samples in ([1, 1], [0, 7], [], [-1, 0]):
            state["books"]["prompts"][0][5][0][1] = samples
            with pytest.raises(InvalidField, match="asked="):
                restored.load_state_dict(state)
        state["books"]["prompts"][0][5][0][1] = [1, 0]
        with pytest.raises(InvalidField, match=r"state\.prompts='prompt 0'.*or it is damaged"):
            restored.load_state_dict(state)
        assert restored.books.numbers == 0, "a state that is refused changes nothing"
        state["books"]["prompts"][0][5][0][1] = [0, 1]
        restored.load_state_dict(state)
        for number in (-5, 0, True, 2**60, "1", None):
            with pytest.raises(InvalidField, match=r"state\.checkpoint="):
                feed.saved(state | {"checkpoint": number})


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
async def test_no_trainer_trains_on_rewards_that_are_not_finite(
    client: RolloutClient, serving: None, reward: float
) -> None:
    """One NaN among a group's rewards would soon be in all of the weights. Such a group can be dropped or mended."""
    feed = marking(client, eta=3, size=4)
    for job in prompts(2):
        await feed.submit(job, 5)
    group, other = await feed.batch(20)
    for one in (group, other):
        one.rewards.extend([1.0, reward])
        with pytest.raises(InvalidField, match="rewards"):
            feed.train([one])
    assert (feed.books.in_flight, feed.books.trained) == (4, 0)
    group.rewards[1] = 0.0
    feed.train([group])
    feed.drop([other])
    assert feed.report()["dropped"] == {"filtered": 2}


async def test_wrong_types_are_refused(client: RolloutClient, serving: None) -> None:
    feed = marking(client, eta=3, size=4)
    await feed.submit(next(prompts(1)), 5)
    (group,) = await feed.batch(20)
    wrong: Any
    for wrong in ("text", 3, None, {"token_ids": [1]}):
        with pytest.raises(InvalidField, match="GenerateJob"):
            await feed.submit(wrong)
        with pytest.raises(InvalidField, match="GenerateJobs"):
            await anext(feed.batches([wrong]))
    for wrong in ("text", 3, None, prompts, {"a": 1}):
        with pytest.raises(InvalidField, match="a list or another iterable"):
            feed.batches(wrong)
    for wrong in (group, [3], [None], None):
        for call in (feed.train, feed.drop):
            with pytest.raises(InvalidField, match="groups="):
                call(wrong)
    for wrong in (None, 3, {}, {"checkpoint": 1}, {"checkpoint": None, "books": {}}):
        for refused in (marking(RolloutClient(), 0, 1).load_state_dict, feed.saved):
            if wrong is not None or refused != feed.saved:  # None is the newest checkpoint
                with pytest.raises(InvalidField, match=r"state.*="):
                    refused(wrong)
    feed.train([group])
    feed.books.check()
