"""What a gateway's user and a trainer's may do with requests and recorded sessions is enough for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import redis.asyncio
from support.pools.pool import eventually, worker
from support.pools.small_gateway import SmallGateway
from support.redis.roles import refusals
from support.specimens.turns import turn

from rolloutmq import RolloutClient
from rolloutmq.messages.broker import RecordedSessions

Url = Callable[..., str]


async def test_gateways_do_their_work(url: Url, admin: redis.asyncio.Redis) -> None:
    """Also where one inherits from another."""
    mine = {"pool": "mine"}
    async with (
        worker(url("worker"), **mine),
        SmallGateway(url("gateway"), **mine) as first,
        SmallGateway(url("gateway"), **mine) as second,
    ):
        answer = await first.ask("k")
        assert await second.ask("k") == answer
        await first.stop()
        await first.gateways.leave()
        registered = second.requests.keys.gateways
        await eventually(lambda: _is(admin.hlen(registered), 1))
    assert await refusals(admin) == []


async def _is(count: Awaitable[int], wanted: int) -> bool:
    return await count == wanted


async def test_a_producer_records_and_takes_sessions(url: Url, admin: redis.asyncio.Redis) -> None:
    async with RolloutClient(url("producer"), "mine") as client:
        for name, idle_s in (("kept", 60.0), ("lost", 0.001)):
            await RecordedSessions(client.broker, idle_s).record("default", name, "k", turn([1], [2]))

        async def ended() -> bool:
            await client.broker.end_overdue()
            return [one.name async for one in client.sessions()] == ["kept"]

        await eventually(ended)
        assert len((await client.take_session("kept")).turns) == 1
        assert await client.forget_session("kept")
    assert await refusals(admin) == []
