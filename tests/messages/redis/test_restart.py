"""A single Redis that restarts, loads, forgets scripts, is full, or cannot save: what callers see, and what goes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.pools.clients import arrived
from support.pools.pool import dump, eventually, replies, short_retries, status, worker
from support.redis.deployments import plain
from support.specimens.messages import job, result, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, Finished, Lease, Release
from rolloutmq.messages.errors import PoolBusy, RedisRefused, RedisUnavailable
from rolloutmq.messages.redis.connection import connect, ping
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine

COMMANDS = 8_000
SLOW_TO_LOAD = {"key-load-delay": "100"}
"""Microseconds per command in the file. A loading server answers after each thousand."""


@pytest.fixture
def lasting() -> Iterator[EmbeddedRedis]:
    """A server that keeps an append-only file and takes a second to load it, a fifth of what a call waits for."""
    with EmbeddedRedis(appendonly=True, config=SLOW_TO_LOAD) as server:
        with plain(server) as client:
            pipe = client.pipeline(transaction=False)
            for number in range(COMMANDS):
                pipe.set("filler", number)
            pipe.execute()
        yield server


async def answer_while_loading(server: EmbeddedRedis) -> None:
    """Return once the server says that it is loading."""

    def loading() -> bool:
        with plain(server) as client:
            try:
                client.ping()
            except Exception as error:
                return "loading" in str(error)
        return False

    await eventually(loading)


async def test_accepted_jobs_and_results_outlive_a_crash_and_a_slow_start(lasting: EmbeddedRedis) -> None:
    jobs = [tokens(n=2) for _ in range(40)]
    async with (
        worker(lasting.url, engine=ScriptedEngine(tokens_per_s=20), max_running=8, lease_s=60) as running,
        RolloutClient(lasting.url) as client,
    ):
        await client.submit_many(jobs)
        await eventually(lambda: arrived(client) >= 10)
        lasting.kill()
        starting = asyncio.create_task(asyncio.to_thread(lasting.start))
        await answer_while_loading(lasting)
        more = asyncio.create_task(client.submit(tokens()))  # asked of a server that is loading: waits for it
        await asyncio.sleep(0)
        assert not starting.done()
        assert (await more).state == "new"
        results = [one async for one in client.results(30)]
        assert len(results) == 81
        assert {one.job_id for one in results} >= {one.id for one in jobs}
        assert client.repeats == 0
        assert running.status.refused_publishes == 0  # the lease outlived it
        await starting


async def test_a_server_that_loads_for_too_long_is_told_as_such(
    lasting: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_retries(monkeypatch)
    async with connect(lasting.url) as client:
        broker = Broker(client, "p")
        lasting.kill()
        starting = asyncio.create_task(asyncio.to_thread(lasting.start))
        await answer_while_loading(lasting)
        # Both at once: for two after each other it may have loaded.
        told = await asyncio.gather(broker.enqueue([job(reply_to="c")]), ping(client), return_exceptions=True)
        assert [type(error) for error in told] == [RedisUnavailable] * 2, told
        assert re.search(r"127\.0\.0\.1:\d+: LOADING", str(told[0]))
        assert "LOADING" in str(told[1])
        await starting
        assert await broker.enqueue([job(reply_to="c")]) == ["new"]


async def test_scripts_are_loaded_again_whenever_they_are_forgotten(db: Redis, redis_db: str) -> None:
    async with worker(redis_db, max_running=4), RolloutClient(redis_db) as client:
        for _ in range(50):
            await db.script_flush()
            assert (await client.submit(tokens())).state == "new"
        assert len([one async for one in client.results(20)]) == 50
        assert client.repeats == 0


# --- full -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def full(redis_server: EmbeddedRedis) -> AsyncIterator[Redis]:
    """A connection to a server that is used by nobody else, to be filled up with `fill`."""
    async with connect(redis_server.url) as client:
        yield client


async def fill(client: Redis, full: bool = True) -> None:
    await client.config_set("maxmemory", 1 if full else 0)


async def test_a_full_server_refuses_new_jobs_whole(full: Redis) -> None:
    broker = Broker(full, "p")
    await broker.enqueue([job(reply_to="c")])
    before = await dump(full)
    await fill(full)
    with pytest.raises(PoolBusy, match="memory limit") as caught:
        await broker.enqueue([job(reply_to="c") for _ in range(3)])
    assert caught.value.reason == "memory"
    assert await dump(full) == before
    await fill(full, False)
    assert await broker.enqueue([job(reply_to="c")]) == ["new"]


async def test_a_full_server_lets_what_it_holds_come_to_an_end(full: Redis) -> None:
    """Else no lease is renewed, nothing is published, taken or cancelled, and so nothing is ever freed."""
    broker, lease = Broker(full, "p"), Lease(full, "p", "w")
    jobs = [job(reply_to="c") for _ in range(4)]
    await broker.enqueue(jobs)
    await fill(full)
    await lease.join(status("w"))
    claims = {claim.job_id: claim.attempt for claim in await lease.claim(3, 3, 0)}
    assert len(claims) == 3
    assert (await lease.heartbeat(status("w"))).held == 3
    assert await lease.complete([Finished(jobs[0].id, claims[jobs[0].id], 0, result(jobs[0]))]) == ["ok"]
    assert await lease.release([Release(jobs[1].id, claims[jobs[1].id])], 3) == ["ok"]
    assert await lease.bury(jobs[2].id, claims[jobs[2].id], "cause", "host", "error")
    assert await broker.cancel([jobs[1].id, jobs[3].id]) == ["ok", "ok"]
    found = await replies(broker, "c")
    assert len(found) == 4
    await broker.ack("c", found)
    assert (await broker.load()).open_jobs == 0
    assert await full.xlen(broker.keys.reply("c")) == 0


async def test_a_pool_on_a_full_server_works_its_jobs_off(redis_server: EmbeddedRedis, full: Redis) -> None:
    async with (
        RolloutClient(redis_server.url) as client,
        worker(redis_server.url, engine=ScriptedEngine(tokens_per_s=50), max_running=4) as running,
    ):
        await client.submit_many([tokens() for _ in range(20)])
        await eventually(lambda: arrived(client) > 0)
        await fill(full)
        with pytest.raises(PoolBusy, match="memory limit"):
            await client.submit(tokens())
        assert len([one async for one in client.results(10)]) == 20
        assert running.status.refused_publishes == 0
        await fill(full, False)
        await client.submit(tokens())
        assert len([one async for one in client.results(10)]) == 1


# --- a disk that takes nothing ----------------------------------------------------------------------------------------


async def test_a_server_that_cannot_save_is_read_from_and_not_written_to(tmp_path: Path) -> None:
    with EmbeddedRedis(directory=tmp_path, config={"save": "3600 1"}) as server, plain(server) as admin:
        async with RolloutClient(server.url, client_id="c") as client:
            async with worker(server.url):
                await client.submit(tokens())
                await eventually(lambda: arrived(client) == 1)
            (tmp_path / "dump.rdb").mkdir()  # what is saved cannot get its name
            admin.bgsave()
            await eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "err")
            before = admin.dbsize()
            with pytest.raises(RedisRefused, match="cannot save its data to disk") as caught:
                await client.submit(tokens())
            assert caught.value.reason == "disk"
            assert admin.dbsize() == before
            async with connect(server.url) as another:  # opened now: even PING is refused
                assert len(await replies(Broker(another, "default"), "c")) == 1
                await ping(another)
            (tmp_path / "dump.rdb").rmdir()
            admin.bgsave()
            await eventually(lambda: admin.info("persistence")["rdb_last_bgsave_status"] == "ok")
            assert (await client.submit(tokens())).state == "new"
