"""`?min_replicas=N`: what a failover must not take back is confirmed by that many replicas before it counts."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from redis.asyncio import Redis
from support.pools.pool import dump, eventually, replies, short_retries, status, worker
from support.redis.deployments import follow, plain, replicated
from support.redis.promises import promises
from support.specimens.messages import job, tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker
from rolloutmq.messages.errors import ConfigError, NotReplicated, RedisRefused
from rolloutmq.messages.redis.connection import connect
from rolloutmq.messages.scripts import runner as lua
from rolloutmq.ops.redis.embedded import EmbeddedRedis

Pair = tuple[EmbeddedRedis, EmbeddedRedis]
ACCEPTED = (["new"], ["q"])
"""The second: a busy machine's replica was asked twice."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with replicated() as (primary, replica):
        yield primary, replica


@pytest.fixture
def url(pair: Pair) -> str:
    return f"{pair[0].url}?min_replicas=1&replica_timeout_ms=100"


@pytest.fixture
async def safe(url: str) -> AsyncIterator[Redis]:
    async with connect(url) as client:
        yield client


@contextmanager
def frozen(server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that does nothing in this block, and little patience with it."""
    os.kill(server.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(lua, "RETRY_BUDGET_S", 0.1)
        yield
    os.kill(server.pid, signal.SIGCONT)


async def test_what_returned_is_on_the_replica(pair: Pair, safe: Redis) -> None:
    broker = Broker(safe, "p")
    one = job(reply_to="c")
    assert await broker.enqueue([one]) in ACCEPTED
    # Told by the replica at once: nothing is waited for here.
    with plain(pair[1]) as replica:
        assert replica.hget(broker.keys.job(one.id), "st") == b"q"
        assert await broker.cancel([one.id]) == ["ok"]
        assert replica.hget(broker.keys.job(one.id), "st") == b"cancelled"


async def test_a_frozen_replica_confirms_nothing(
    pair: Pair, safe: Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, one = Broker(safe, "p"), job(reply_to="c")
    with frozen(pair[1], monkeypatch):
        with pytest.raises(NotReplicated, match=r"enqueue: 0 of 1 replicas .* with their ids\) is safe"):
            await broker.enqueue([one])
        # The same again has nothing to write, on a new connection at that: WAIT alone would say that all is well.
        async with connect(url) as another:
            with pytest.raises(NotReplicated):
                await Broker(another, "p").enqueue([one])
        assert (await broker.load()).accepted == 1
    assert await broker.enqueue([one]) == ["q"]
    with plain(pair[1]) as replica:
        assert replica.exists(broker.keys.job(one.id))


async def test_something_is_written_before_each_wait(pair: Pair, safe: Redis) -> None:
    """A server from 7.2 on waits for what this very connection wrote: nothing, if the job was there before."""
    broker, one = Broker(safe, "p"), job(reply_to="c")
    await broker.enqueue([one])
    await safe.delete(f"{broker.keys.prefix}mark")
    async with connect(f"{pair[0].url}?min_replicas=1") as another:
        assert await Broker(another, "p").enqueue([one]) == ["q"]
    with plain(pair[1]) as replica:
        assert replica.ttl(f"{broker.keys.prefix}mark") > 0


async def test_each_outcome_waits_for_the_replica(pair: Pair, safe: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await promises(safe)
    broker, lease, ledger = made.broker, made.lease, made.ledger
    with frozen(pair[1], monkeypatch):
        # What need not survive goes on.
        await lease.heartbeat(status("w"))
        await lease.reap(3)
        await broker.end_overdue()
        await ledger.announce(made.announcement)
        for attempt in made.calls:
            with pytest.raises(NotReplicated):
                await attempt()
        before = await dump(safe, skip=("bell", "wake", "mark"))
    assert await lease.complete([made.finished]) == ["again"]
    await asyncio.gather(*(attempt() for attempt in made.calls))
    assert await dump(safe, skip=("bell", "wake", "mark")) == before  # the second time changed nothing
    with plain(pair[1]) as replica:
        assert replica.hget(broker.keys.weights, "committed") == b"3"
    assert len(await replies(broker, "c")) == 5


async def test_a_replica_that_comes_back_in_time_is_waited_for(pair: Pair, safe: Redis) -> None:
    broker = Broker(safe, "p")
    os.kill(pair[1].pid, signal.SIGSTOP)
    accepting = asyncio.create_task(broker.enqueue([job(reply_to="c")]))

    async def tried_twice() -> bool:
        with plain(pair[0]) as primary:
            return bool(primary.info("commandstats").get("cmdstat_wait", {}).get("calls", 0) >= 2)

    await eventually(tried_twice)
    assert not accepting.done()
    os.kill(pair[1].pid, signal.SIGCONT)
    assert await accepting in ACCEPTED


async def test_scripts_forgotten_by_the_server_are_loaded_again(pair: Pair, safe: Redis) -> None:
    broker = Broker(safe, "p")
    for _ in range(2):
        assert await broker.enqueue([job(reply_to="c")]) in ACCEPTED
        await safe.script_flush()


async def test_worker_and_client_go_on_when_the_replica_is_back(
    pair: Pair, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(url, max_running=4, lease_s=5) as running, RolloutClient(url) as client:
        await client.submit_many([tokens() for _ in range(10)])
        assert len([one async for one in client.results(10)]) == 10
        jobs = [tokens() for _ in range(10)]
        with frozen(pair[1], monkeypatch), pytest.raises(NotReplicated):
            await client.submit_many(jobs)
        await client.submit_many(jobs)
        outcomes = [one async for one in client.results(10)]
        assert sorted(one.job_id for one in outcomes) == sorted(one.id for one in jobs)
        assert client.repeats == 0
        assert running.status.refused_publishes == 0


async def test_an_accepted_job_survives_a_failover(pair: Pair, url: str) -> None:
    """The whole point: the primary is lost right after it accepted, and nobody had time to copy anything by chance."""
    primary, replica = pair
    async with connect(url) as safe:
        one = job(reply_to="c")
        await Broker(safe, "p").enqueue([one])
        primary.kill()
    with plain(replica) as survivor:
        survivor.replicaof("NO", "ONE")
    async with connect(replica.url) as safe:
        assert await Broker(safe, "p").enqueue([one]) == ["q"]


async def test_a_primary_that_misses_its_replicas_refuses(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """min-replicas-to-write: the primary itself says no before it writes, to scripts on 6.2 as well."""
    primary, replica = pair
    with plain(primary) as admin:
        admin.config_set("min-replicas-to-write", 1)
        async with connect(primary.url) as client:
            broker = Broker(client, "p")
            await broker.enqueue([job(reply_to="c")])
            replica.kill()
            await eventually(lambda: admin.info("replication")["connected_slaves"] == 0)
            before = await dump(client)
            # It waits for the replica to come back ...
            calls = admin.info("commandstats")["cmdstat_evalsha"]["calls"]
            waiting = asyncio.create_task(broker.enqueue([job(reply_to="c")]))
            await eventually(lambda: admin.info("commandstats")["cmdstat_evalsha"]["calls"] >= calls + 2)
            assert not waiting.done()
            await asyncio.to_thread(replica.start)
            await asyncio.to_thread(follow, replica, primary)
            assert await waiting == ["new"]
            replica.kill()
            await eventually(lambda: admin.info("replication")["connected_slaves"] == 0)
            before = await dump(client)
        # ... but not for ever.
        short_retries(monkeypatch)
        async with connect(primary.url) as client:
            with pytest.raises(RedisRefused, match="min-replicas-to-write") as caught:
                await Broker(client, "p").enqueue([job(reply_to="c")])
            assert caught.value.reason == "replicas"
            assert await dump(client) == before


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("min_replicas=-1", "min_replicas must be a number from 0 to 16"),
        ("min_replicas=one", "min_replicas must be a number"),
        ("min_replicas=1&replica_timeout_ms=0", "replica_timeout_ms must be a number from 1 to 3000"),
        ("min_replicas=1&replica_timeout_ms=5000", "replica_timeout_ms must be a number from 1 to 3000"),
    ],
)
def test_options_are_checked(query: str, complaint: str) -> None:
    for base in ("redis://h/0", "redis+sentinel://h/main", "redis+cluster://h", "unix:///s"):
        with pytest.raises(ConfigError, match=complaint):
            connect(f"{base}?{query}", pool="p")
