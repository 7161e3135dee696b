"""What waits are told of a pool that stands still, and what that costs Redis."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.feeds import prompts
from support.pools.pool import eventually, worker
from support.redis.deployments import plain
from support.redis.roles import create
from support.specimens.messages import tokens
from typer.testing import CliRunner

from rolloutmq import RolloutClient, Staleness, WaitTimeout
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer import diagnosis
from rolloutmq.producer.diagnosis import PoolReading, waits


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits look soon, and know of no earlier reading."""
    monkeypatch.setattr(waits, "FIRST_S", 0.2)
    monkeypatch.setattr(waits, "_pools", {})


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[PoolReading]:
    """Those that are made from now on."""
    made: list[PoolReading] = []

    async def read(*args: Any) -> PoolReading:
        made.append(await diagnosis.read_pool(*args))
        return made[-1]

    monkeypatch.setattr(waits, "read_pool", read)
    return made


async def test_a_wait_in_vain_says_why_in_its_error_and_before_that_in_the_log(
    redis_db: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutClient(redis_db, client_id="client") as client:
        handle = await client.submit(tokens())
        waiting = asyncio.create_task(client.wait(handle, 1.0))
        await eventually(lambda: "jobs wait: no-worker: the pool has no worker" in caplog.text)
        assert not waiting.done()
        with pytest.raises(WaitTimeout, match=r"nothing arrived .* 1 s\. no-worker: .*rolloutmq worker") as caught:
            await waiting
        with pytest.raises(WaitTimeout, match="no-worker"):
            await handle.result(0.3)
    assert caplog.text.count("no-worker") == 1, "once a cause"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.why) == (str(caught.value), caught.value.why)


async def test_all_waits_of_a_process_share_readings(redis_db: str, readings: list[PoolReading], db: Redis) -> None:
    clients = [RolloutClient(redis_db) for _ in range(4)]
    handles = [await client.submit(tokens()) for client in clients for _ in range(25)]
    await db.config_resetstat()
    found = await asyncio.gather(*(handle.result(0.7) for handle in handles), return_exceptions=True)
    assert {"no-worker" in str(one) for one in found} == {True}
    assert 1 <= len(readings) <= 2
    hgetall = (await db.info("commandstats"))["cmdstat_hgetall"]["calls"]
    await diagnosis.read_pool(clients[0].broker)
    each = (await db.info("commandstats"))["cmdstat_hgetall"]["calls"] - hgetall
    assert hgetall <= each * len(readings)
    for client in clients:
        await client.aclose()


async def test_a_wait_that_is_answered_asks_nothing(redis_db: str, readings: list[PoolReading]) -> None:
    async with worker(redis_db), RolloutClient(redis_db) as client:
        for _ in range(20):
            await client.wait(await client.submit(tokens()), 30)
    assert readings == []


async def test_short_waits_in_a_row_are_one_long_wait(redis_db: str, readings: list[PoolReading]) -> None:
    async with RolloutClient(redis_db) as client:
        handle = await client.submit(tokens())

        async def told() -> str:
            with pytest.raises(WaitTimeout) as late:
                await handle.result(0.05)
            return late.value.why

        assert await told() == ""
        await eventually(told)
        for _ in range(5):
            assert "no-worker" in await told()
    assert len(readings) == 1


async def test_a_redis_that_is_gone_is_a_reason(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(*_: Any) -> PoolReading:
        raise ConnectionError("connection refused")

    async with RolloutClient(redis_db) as client:
        handle = await client.submit(tokens())
        monkeypatch.setattr(waits, "read_pool", away)
        with pytest.raises(WaitTimeout, match="redis-away: connection refused"):
            await handle.result(0.4)


async def test_a_full_pool_is_told_while_submit_waits(
    redis_db: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rolloutmq.messages import Caps, PoolBusy  # noqa: PLC0415
    from rolloutmq.producer import sending  # noqa: PLC0415

    monkeypatch.setattr(sending, "FIRST_S", 0.1)
    async with RolloutClient(redis_db, caps=Caps(jobs=1)) as client:
        with caplog.at_level(logging.WARNING), pytest.raises(PoolBusy):
            await client.submit_many([tokens(), tokens()], timeout=0.5)
    assert "1 jobs wait for room: pool-full" in caplog.text


def test_generate_says_why_nothing_comes(redis_db: str, caplog: pytest.LogCaptureFixture) -> None:
    waited = CliRunner().invoke(app, ["generate", "hello", "--timeout", "0.5", "--redis", redis_db])
    assert waited.exit_code != 0
    assert "jobs wait: no-worker" in caplog.text
    assert "no-worker" in str(waited.exception) + waited.output


async def test_who_may_not_look_is_told_that(redis_server: EmbeddedRedis) -> None:
    for more, told in (("", "not shown to this Redis user"), ("+zcount +zrange %R~rmq:{mine}:*", "no-worker")):
        with plain(redis_server) as admin:
            if more and admin.info("server")["redis_version"] < "7":
                continue
        async with RolloutClient(create(redis_server, "producer", "mine", more), "mine") as client:
            with pytest.raises(WaitTimeout, match=told):
                await (await client.submit(tokens())).result(0.5)
        waits._pools.clear()


async def test_a_wait_for_the_next_update_says_so(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No reading of the pool has it: there is no job."""
    monkeypatch.setattr("rolloutmq.producer.training.feed.SAY_S", 0.05)
    async with worker(redis_db):
        feed = client.feed(Staleness(eta=0, batch_size=2, on_stale="mark"))
        job, more = prompts(2)
        await feed.submit(job)
        feed.train(await feed.batch())
        waits = asyncio.create_task(feed.submit(more))
        await eventually(lambda: "call advance()" in caplog.text)
        feed.advance(1)
        await waits
