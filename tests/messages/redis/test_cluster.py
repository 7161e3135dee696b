"""Redis Cluster: each pool is on the node that has its slot, and goes along when the slot goes elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from support.pools.clients import arrived
from support.pools.pool import check_scripted, dump, eventually, short_retries, worker
from support.redis.deployments import Cluster, cluster, plain, soon
from support.specimens.messages import job, tokens

from rolloutmq import GenerateJob, RolloutClient
from rolloutmq.messages import Broker
from rolloutmq.messages.errors import ConfigError, RedisUnavailable
from rolloutmq.messages.redis.connection import connect, ping
from rolloutmq.ops.status import pool_state
from rolloutmq.worker.scripted.engine import ScriptedEngine

POOLS = ("a", "b", "c")


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """One for the tests that break nothing."""
    with cluster() as made:
        yield made


@pytest.fixture
def own() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


async def served(client: RolloutClient, jobs: list[GenerateJob]) -> None:
    """All of these jobs' samples arrive, once."""
    await client.submit_many(jobs)
    results = [one async for one in client.results(30)]
    assert sorted(one.job_id for one in results) == sorted(one.id for one in jobs for _ in range(one.n))
    for one in results:
        check_scripted(one, 3)


async def test_pools_on_different_nodes(shared: Cluster) -> None:
    assert len({id(shared.node_of(pool)) for pool in POOLS}) == 3  # what this test is about

    async def use(pool: str) -> None:
        async with (
            worker(shared.url, pool=pool, lease_s=2),
            RolloutClient(shared.url, pool, client_id="c") as client,
        ):
            await served(client, [tokens(n=2) for _ in range(20)])
            assert (await client.load()).done == 20
            assert len(await client.workers()) == 1

    await asyncio.gather(*(use(pool) for pool in POOLS))
    for pool in POOLS:
        with plain(shared.node_of(pool)) as node:
            # Nothing of a pool is elsewhere, and nothing else is here.
            assert all(key.startswith(b"rmq:{%s}:" % pool.encode()) for key in node.keys("*"))
            assert node.dbsize() > 0
        assert (await pool_state(shared.url, pool))["ended"]["done"] == 20


async def test_a_pool_is_found_from_any_node(shared: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in shared.nodes:
        async with connect(f"redis+cluster://127.0.0.1:1,127.0.0.1:{node.port}", pool="a") as client:
            await ping(client)
            assert await Broker(client, "a").cancel(["0" * 32]) == ["unknown"]
    short_retries(monkeypatch)
    async with connect("redis+cluster://127.0.0.1:1", pool="a") as client:
        with pytest.raises(RedisUnavailable, match=r"cluster 127.0.0.1:1: no node .* slot 15495.*Connect call failed"):
            await ping(client)


def test_a_cluster_has_to_be_told_the_pool() -> None:
    with pytest.raises(ConfigError, match="told the pool"):
        connect("redis+cluster://h:1")
    with pytest.raises(ConfigError, match=r"nothing \(or /0\) may follow"):
        connect("redis+cluster://h:1/1", pool="a")
    with pytest.raises(ConfigError, match="unknown option db"):
        connect("redis+cluster://h:1?db=1", pool="a")


async def test_a_single_server_is_no_cluster(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    async with connect(redis_db.replace("redis://", "redis+cluster://"), pool="a") as client:
        with pytest.raises(RedisUnavailable, match="cluster support disabled"):
            await ping(client)


async def test_a_pool_outlives_the_node_it_is_on(own: Cluster) -> None:
    await asyncio.to_thread(own.add_replica, own.node_of("a"))
    url = f"{own.url}?min_replicas=1&replica_timeout_ms=500"
    async with (
        worker(own.url, pool="a", engine=ScriptedEngine(tokens_per_s=20), max_running=8, lease_s=8),
        RolloutClient(url, "a") as client,
        RolloutClient(own.url, "a") as later,
    ):
        await client.submit_many(jobs := [tokens() for _ in range(60)])
        await eventually(lambda: arrived(client) > 5)
        own.node_of("a").kill()
        results = [one async for one in client.results(40)]
        assert sorted(one.job_id for one in results) == sorted(one.id for one in jobs)
        await served(later, [tokens() for _ in range(10)])


async def test_a_slot_that_moves_under_load(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its keys are on the way the pool stands still; then everybody finds it at its new place."""
    target = next(node for node in own.nodes if node is not own.node_of("a"))
    jobs = [tokens() for _ in range(200)]
    async with worker(own.url, pool="a", engine=ScriptedEngine(tokens_per_s=50), max_running=8, lease_s=8) as running:
        async with RolloutClient(own.url, "a") as client:
            await client.submit_many(jobs)
            await eventually(lambda: arrived(client) > 20)
            own.begin_move("a", target)
            for _ in range(5):
                await asyncio.to_thread(own.move_keys, "a", target, 20)
                await asyncio.sleep(0.05)  # what is tried meanwhile must not do harm
            while await asyncio.to_thread(own.move_keys, "a", target):
                pass
            own.end_move("a", target)
            results = [one async for one in client.results(40)]
            assert sorted(one.job_id for one in results) == sorted(one.id for one in jobs)
            assert client.repeats == 0
            assert (await client.load()).open_jobs == 0
        assert running.status.refused_publishes == 0
    with plain(target) as node:
        assert node.dbsize() > 0


async def test_no_script_is_done_by_half_while_its_slot_moves(own: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client's reply stream is there, the other's is not: a script would end one job and break off at the next."""
    target = next(node for node in own.nodes if node is not own.node_of("a"))
    short_retries(monkeypatch)
    jobs = [job(reply_to="c"), job(reply_to="c"), job(reply_to="d")]
    async with connect(own.url, pool="a") as client, connect(own.node_of("a").url) as direct:
        broker = Broker(client, "a")
        await broker.enqueue(jobs)
        await broker.cancel([jobs[0].id])
        before = await dump(direct)
        own.begin_move("a", target)
        both = [jobs[1].id, jobs[2].id]
        attempts = [broker.cancel(both), broker.enqueue([jobs[0], job(reply_to="c")]), broker.end_overdue()]
        for attempt in attempts:
            with pytest.raises(RedisUnavailable, match="slot is being moved"):
                await attempt
        assert await dump(direct) == before
        plain(target).execute_command("CLUSTER SETSLOT", own.slot("a"), "STABLE")
        plain(own.node_of("a")).execute_command("CLUSTER SETSLOT", own.slot("a"), "STABLE")
        assert await broker.cancel(both) == ["ok", "ok"]


async def test_a_cluster_that_is_down_is_waited_for(own: Cluster) -> None:
    """Without its other nodes a node answers CLUSTERDOWN; the command that met it gets through when they are back."""
    others = [node for node in own.nodes if node is not own.node_of("a")]
    async with connect(own.url, pool="a") as client:
        broker = Broker(client, "a")
        await broker.load()
        for node in others:
            node.kill()

        def down() -> bool:
            with contextlib.suppress(Exception):
                plain(own.node_of("a")).get("rmq:{a}:x")
                return False
            return True

        await asyncio.to_thread(soon, down)
        cancelling = asyncio.create_task(broker.cancel(["0" * 32]))
        for node in others:
            await asyncio.to_thread(node.start)
        assert await cancelling == ["unknown"]
