"""Under `on_stale="drop"` no data set is burned without a word, whatever becomes of the updates."""

from __future__ import annotations

import logging
from itertools import islice

import pytest
from support.pools.feeds import prompts

from rolloutmq import RolloutClient, Staleness, WaitTimeout
from rolloutmq.producer.training import RolloutFeed

DROP = Staleness(eta=1, batch_size=4, on_stale="drop")


async def train_all(feed: RolloutFeed) -> None:
    """Updates are said and not published."""
    async for batch in feed.batches(islice(prompts(200), feed.books.numbers, None), timeout=0.3):
        feed.train(batch)
        feed.advance(feed.books.version + 1)


async def test_a_pool_that_stays_behind_stops_the_trainer_also_a_restored_one(redis_db: str, serving: None) -> None:
    async with RolloutClient(redis_db, client_id="trainer") as client:
        feed = client.feed(DROP)
        with pytest.raises(WaitTimeout, match="publish each one"):
            await train_all(feed)
        most = 2 * DROP.batch_size * (DROP.eta + 1)
        assert feed.books.accepted <= most
        state = feed.state_dict()
    async with RolloutClient(redis_db, client_id="trainer") as client:
        feed = client.feed(DROP)
        feed.load_state_dict(state)
        feed.renumber(feed.books.version + 5)
        with pytest.raises(WaitTimeout):
            await train_all(feed)
        assert feed.books.accepted <= most + DROP.batch_size * (DROP.eta + 1)


async def test_a_run_that_drops_more_than_it_trains_says_so_and_not_too_often(
    client: RolloutClient, serving: None, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a loop that says `advance` after each of several optimizer steps on one batch."""
    feed = client.feed(Staleness(eta=0, batch_size=48, on_stale="drop"))
    with caplog.at_level(logging.WARNING, "rolloutmq"):
        for job in prompts(3, n=16):
            await feed.submit(job, 5)
        feed.advance(1)
        assert await feed.batch(20) == [], "all of it was generated with the weights before"
        told = [int(it.args[0]) for it in caplog.records if "dropped as stale" in it.msg]  # type: ignore[index, arg-type]
    assert feed.books.dropped["stale"] == 48
    assert told == [48]
