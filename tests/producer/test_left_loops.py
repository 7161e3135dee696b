"""A loop that is left early: its last outcome is acknowledged when the code that has it begins another loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived, flush
from support.pools.interrupts import interrupted_at
from support.pools.pool import eventually, stream_length
from support.specimens.messages import tokens

from rolloutmq import BlockingRolloutClient, RolloutClient
from rolloutmq.messages import Broker


async def by_break(client: RolloutClient) -> None:
    async for _ in client.groups(20):
        break


async def by_error(client: RolloutClient) -> None:
    with contextlib.suppress(ValueError):
        async for _ in client.results(20):
            raise ValueError("the code catches it, and comes back")


async def by_wait_for(client: RolloutClient) -> None:
    await asyncio.wait_for(anext(client.groups()), 20)


async def by_a_task_of_its_own(client: RolloutClient) -> None:
    await asyncio.create_task(by_break(client))


LEAVES = [by_break, by_error, by_wait_for, by_a_task_of_its_own]


@pytest.mark.parametrize("leave", LEAVES)
async def test_the_next_loop_acknowledges_what_the_one_before_gave(
    client: RolloutClient, broker: Broker, serving: None, leave: Callable[[Any], Coroutine[Any, Any, None]]
) -> None:
    await client.submit_many([tokens() for _ in range(5)])
    await eventually(lambda: arrived(client) == 5)
    for _ in range(5):
        await leave(client)
    await eventually(lambda: acknowledged_but(1, client, broker))
    assert [one async for one in client.results(20)] == []
    await eventually(lambda: acknowledged_but(0, client, broker))


async def acknowledged_but(count: int, client: RolloutClient, broker: Broker) -> bool:
    await flush(client)
    return await stream_length(broker.redis, broker) == count


@pytest.mark.one_shard
async def test_other_code_that_begins_a_loop_leaves_it_to_the_code_that_has_it(
    client: RolloutClient, broker: Broker, db: Redis, serving: None
) -> None:
    """It may still work on its outcome, which a crash must not lose."""
    took, go_on = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        await by_break(client)
        took.set()
        await go_on.wait()

    await client.submit_many([tokens() for _ in range(3)])
    working = asyncio.create_task(first())
    await took.wait()
    assert len([one async for one in client.results(20)]) == 2
    await flush(client)
    assert await stream_length(db, broker) == 1
    go_on.set()
    await working
    await client.aclose()
    assert await stream_length(db, broker) == 1, "closing is not coming back"


async def test_a_plain_loop_that_is_left_each_time(redis_db: str, broker: Broker, db: Redis, serving: None) -> None:
    def plain() -> None:
        with BlockingRolloutClient(redis_db, client_id="client") as client:
            client.submit_many([tokens() for _ in range(5)])
            for _ in range(4):
                next(iter(client.groups(20)))
            for _ in client.results(20):
                break

    await asyncio.to_thread(plain)
    assert await stream_length(db, broker) == 1


@pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")
def test_ctrl_c_on_the_way_to_the_next_item_acknowledges_the_one_before(redis_db: str, serving_thread: None) -> None:
    gc.freeze()  # what there is need not be walked each time
    for line in itertools.count(1):
        with BlockingRolloutClient(redis_db, client_id="client") as client:
            client.submit(tokens(n=2))
            asyncio.run(eventually(lambda client=client: arrived(client) == 2))
            loop = client.results(10)
            next(loop)
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(line):
                next(loop)
                break
            assert len(list(client.results(10))) == 1
            del loop  # as late as garbage collection may take it
            gc.collect()
        with BlockingRolloutClient(redis_db, client_id="client") as client:
            assert list(client.results(1)) == []
    gc.unfreeze()
    assert line > 5
