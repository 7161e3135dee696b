"""How many connections there are, and what happens when a server has no room for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from redis.asyncio import BlockingConnectionPool, Redis
from support.pools.pool import eventually, pauses

from rolloutmq import RolloutClient
from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.messages.redis import connect, connection, ping
from rolloutmq.messages.redis.retry import BoundedRetry, within
from rolloutmq.ops.redis.embedded import EmbeddedRedis

ROOM = 20


@pytest.fixture(scope="module")
def small() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(config={"maxclients": str(ROOM)}) as server:
        yield server


@pytest.mark.parametrize("where", ["url", "unix_url"])
async def test_a_server_without_room_is_told_from_one_that_is_gone(small: EmbeddedRedis, where: str) -> None:
    url = getattr(small, where)
    clients = [connect(url) for _ in range(ROOM + 1)]
    try:
        await asyncio.gather(*(ping(client) for client in clients[:ROOM]))
        told = r"takes no more connections.*`maxclients`.*CONFIG SET maxclients"
        for attempt in (ping(clients[ROOM], once=True), clients[ROOM].get("k"), RolloutClient(url).open()):
            with pytest.raises(RedisUnavailable, match=told), within(0.2):
                await attempt
        await clients[0].aclose()
        await ping(clients[ROOM])  # there is room again
    finally:
        for client in clients:
            await client.aclose()


async def test_connections_that_nobody_uses_are_closed(
    redis_db: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connections() -> int:
        return sum(one["name"] == "busy" for one in await db.client_list())

    async with connect(f"{redis_db}?client_name=busy") as client:
        await asyncio.gather(*(client.blpop(["none"], timeout=0.2) for _ in range(8)))
        assert await connections() == 8
        await client.ping()
        assert await connections() == 8
        monkeypatch.setattr(connection, "IDLE_S", 0.0)
        await client.ping()

        async def none_is_left() -> bool:
            return await connections() == 0

        await eventually(none_is_left)
        monkeypatch.setattr(connection, "IDLE_S", 10.0)
        await client.set("k", "v")
        assert await asyncio.gather(*(client.get("k") for _ in range(4))) == [b"v"] * 4


async def test_a_read_over_shared_connections_is_not_sent_again(
    redis_db: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(redis_db) as client:
        reader = client.reader(1)
        waiting = asyncio.create_task(reader.xread({"s": "$"}, block=20_000))

        async def blocked() -> list[dict[str, str]]:
            return [one for one in await db.client_list() if one["cmd"] == "xread"]

        (one,) = await eventually(blocked)
        made = pauses(monkeypatch)
        await db.client_kill(one["addr"])
        with pytest.raises(RedisUnavailable):
            await waiting
        assert made == []
        await reader.aclose()
        await client.ping()  # closed with its owner, not before


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client has two connections. Calls that wait for one look every 50 ms whether Redis answers anybody."""
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(connection, "REPLY_TIMEOUT_S", 0.05)


@pytest.mark.usefixtures("two_at_once")
async def test_a_call_waits_for_its_turn_as_long_as_it_takes(
    redis_db: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, client = 0, connect(redis_db)
    really = BlockingConnectionPool.get_connection

    async def counted(pool: BlockingConnectionPool, *args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += pool is client.connection_pool
        return await really(pool, *args, **options)

    monkeypatch.setattr(BlockingConnectionPool, "get_connection", counted)
    await db.set("k", "v")
    async with client:
        slow = [asyncio.create_task(client.blpop(["list"], timeout=20)) for _ in range(2)]
        await eventually(lambda: looks == 2)
        waiting = [asyncio.create_task(client.get("k")) for _ in range(5)]
        await eventually(lambda: looks > 2 + 2 * 5 or any(call.done() for call in waiting))
        await db.rpush("list", "a", "b")
        assert await asyncio.gather(*waiting) == [b"v"] * 5
        assert len(await asyncio.gather(*slow)) == 2


@pytest.mark.usefixtures("two_at_once")
async def test_nobody_waits_for_a_turn_at_a_server_that_answers_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BoundedRetry", partial(BoundedRetry, 0.2, 0.2))
    tried = 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tried
        tried += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server, connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0") as client:
        answers = await asyncio.gather(*(client.get("k") for _ in range(100)), return_exceptions=True)
    assert {type(answer) for answer in answers} == {RedisUnavailable}
    assert tried < 50  # one turn after the other, each of the 100 would try
