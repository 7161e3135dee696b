"""An asyncio client on a second event loop: it says so at once, and the jobs are there for a new client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.specimens.messages import tokens

from rolloutmq import PoolControl, RolloutClient, Staleness, WrongLoop
from rolloutmq.producer.loop_thread import LoopThread


def test_a_second_event_loop_is_refused_by_name(redis_db: str) -> None:
    """A notebook, or a script with two `asyncio.run`. The jobs are there for a new client of the same id."""
    client = RolloutClient(redis_db, client_id="client")
    thread = LoopThread("the first loop")
    thread.run(client.submit(tokens(min_version=9)))
    feed = client.feed(Staleness(eta=0, batch_size=1))
    acts = (
        client.open,
        lambda: client.submit(tokens()),
        lambda: anext(client.results(1)),
        lambda: client.generate([[1]], timeout=1),
        lambda: anext(client.stream(tokens())),
        lambda: feed.take(1),
        client.load,
        client.cancel_all,
        client.control.pause,
        client.aclose,
    )
    try:
        for act in acts:
            with pytest.raises(
                WrongLoop, match="belongs to another event loop, which still runs: make a new one in each"
            ):
                asyncio.run(_awaited(act()))
        assert thread.run(client.cancel_all()) == 1, "on its own loop it goes on"
    finally:
        thread.close(client.aclose)


def test_a_second_asyncio_run_is_told_that_the_first_has_ended(redis_db: str) -> None:
    client = RolloutClient(redis_db, client_id="client")
    handle = asyncio.run(client.submit(tokens(min_version=9)))
    with pytest.raises(WrongLoop, match="client client belongs to another event loop, which has ended"):
        asyncio.run(client.wait(handle, 1))

    async def go_on() -> list[str]:
        async with RolloutClient(redis_db, client_id="client") as new:
            assert new.outstanding == 1
            return await new.cancel([handle])

    assert asyncio.run(go_on()) == ["ok"]


def test_a_connection_that_was_closed_opens_again_on_another_loop(redis_db: str) -> None:
    async def ask() -> Any:
        async with control:
            return await control.version()

    control = PoolControl(redis_db)
    assert [list(asyncio.run(ask())) for _ in range(2)] == [[], []]


async def _awaited(it: Any) -> Any:
    return await it
