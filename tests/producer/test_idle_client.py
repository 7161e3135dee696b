"""What a client that waits costs Redis, and what it must not miss meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, stream_length, worker
from support.specimens.messages import tokens

from rolloutmq import JobFailure, RolloutClient
from rolloutmq.messages import Broker
from rolloutmq.messages.redis import connection
from rolloutmq.producer.inbox import reader


def watch(monkeypatch: pytest.MonkeyPatch, broker: Broker, name: str) -> list[dict[str, Any]]:
    """The named arguments of each call of a broker's method from now on."""
    calls: list[dict[str, Any]] = []
    really = getattr(broker, name)

    async def watched(*args: Any, **named: Any) -> Any:
        calls.append(named)
        return await really(*args, **named)

    monkeypatch.setattr(broker, name, watched)
    return calls


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads wait long from the beginning, as if nothing had come for a while."""
    monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 20_000)


@pytest.mark.one_shard
async def test_reads_wait_longer_and_longer_until_something_comes(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 1)
    monkeypatch.setattr(reader, "LONGEST_BLOCK_MS", 16)
    client = RolloutClient(redis_db)
    reads = watch(monkeypatch, client.broker, "read_replies")
    async with client:
        waits = lambda: [named["block_ms"] for named in reads if named.get("block_ms")]  # noqa: E731
        await eventually(lambda: len(waits()) >= 7)
        assert waits()[:7] == [1, 2, 4, 8, 16, 16, 16]
        handle = await client.submit(tokens())
        await eventually(lambda: waits()[-1] == 16)
        before = len(waits())
        async with worker(redis_db):
            await client.wait(handle, 10)
        await eventually(lambda: 1 in waits()[before:])


@pytest.mark.usefixtures("patient")
@pytest.mark.one_shard
async def test_one_connection(redis_db: str, db: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client that has just opened, and again of one that has waited for a while."""

    async def connections() -> int:
        return sum(one["name"] == "waiter" for one in await db.client_list())

    async with RolloutClient(f"{redis_db}?client_name=waiter") as client:
        assert await connections() == 1
        handle = await client.submit(tokens())
        assert await connections() == 2
        monkeypatch.setattr(connection, "IDLE_S", 0.0)
        monkeypatch.setattr(reader, "LONGEST_BLOCK_MS", 1)
        async with worker(redis_db):  # its answer ends the long read
            await client.wait(handle, 10)
        monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 1)

        async def one_is_left() -> bool:
            return await connections() == 1

        await eventually(one_is_left)
        await client.submit(tokens())


@pytest.mark.usefixtures("patient")
@pytest.mark.one_shard
async def test_one_connection_of_its_own_is_enough(redis_db: str) -> None:
    """Blocking reads come on top of what the URL allows."""
    async with RolloutClient(f"{redis_db}?max_connections=1") as client, worker(redis_db):
        assert [delta async for delta in client.stream(tokens(stream=True), timeout=10)]


@pytest.mark.usefixtures("patient")
async def test_a_deadline_passes_in_a_pool_without_workers(client: RolloutClient) -> None:
    late = await client.submit(tokens(deadline_s=0.2))
    group = await client.ending(late, 10)
    assert [failure.outcome for failure in group.failures] == ["expired"]


@pytest.mark.usefixtures("patient")
async def test_a_deadline_of_an_earlier_process_passes(redis_db: str) -> None:
    first = await RolloutClient(redis_db, client_id="client").open()
    await first.submit(tokens(deadline_s=0.3))
    await first.aclose()
    async with RolloutClient(redis_db, client_id="client") as second:
        (failure,) = [one async for one in second.results(10)]
    assert isinstance(failure, JobFailure)


@pytest.mark.usefixtures("patient")
async def test_a_task_ends_at_its_deadline(client: RolloutClient) -> None:
    with pytest.raises(Exception, match="deadline passed in the queue"):
        await client.embed([[1, 2, 3]], deadline_s=0.2, timeout=10)


@pytest.mark.one_shard
async def test_the_clock_is_witnessed_after_a_submission_that_comes_late(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While reads wait for long, the first look after a submission does not wait for their end."""
    monkeypatch.setattr(reader, "LONGEST_BLOCK_MS", 20_000)
    monkeypatch.setattr(reader, "FIRST_BLOCK_MS", 1)
    monkeypatch.setattr(reader, "LOOK_S", 0.01)
    client = RolloutClient(redis_db)
    reads, looks = (watch(monkeypatch, client.broker, name) for name in ("read_replies", "end_overdue"))
    async with client:
        await eventually(lambda: reads[-1].get("block_ms", 0) >= 512)
        await client.submit(tokens())
        await eventually(lambda: looks)


@pytest.mark.usefixtures("patient")
async def test_what_was_taken_leaves_the_stream_while_a_read_waits(
    client: RolloutClient, broker: Broker, db: Redis, serving: None
) -> None:
    await client.wait(await client.submit(tokens()), 10)

    async def acknowledged() -> bool:
        return await stream_length(db, broker) == 0

    await eventually(acknowledged, 5)


@pytest.mark.usefixtures("patient")
async def test_closing_does_not_wait_for_the_read(redis_db: str) -> None:
    client = await RolloutClient(redis_db).open()
    await client.submit(tokens(deadline_s=600.0))
    await asyncio.wait_for(client.aclose(), 10)
    assert not [task for task in asyncio.all_tasks() if "StreamReader" in repr(task)]
