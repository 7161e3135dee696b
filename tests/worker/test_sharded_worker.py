"""A worker and a client over several shards: a shard that is lost costs its own jobs and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError
from support.pools.pool import check_scripted, eventually, worker
from support.redis.deployments import cluster
from support.specimens.messages import SHORT, tokens

from rolloutmq import RolloutClient, SamplingParams
from rolloutmq.messages.broker import Claim, Release
from rolloutmq.messages.redis import Keys, shard_of
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.engine import AdapterMissing
from rolloutmq.worker.scripted.engine import ScriptedEngine

pytestmark = pytest.mark.one_shard
LONG = SamplingParams(max_new_tokens=6000)
"""A minute of the engine's clock."""


async def test_a_cluster_spreads_the_shards_of_a_pool() -> None:
    with cluster() as nodes:
        async with RolloutClient(f"{nodes.url}?shards=4") as client, worker(f"{nodes.url}?shards=4"):
            handles = await client.submit_many([tokens(n=2, sampling=SHORT) for _ in range(24)])
            found = [one async for one in client.results(20)]
    assert {(one.job_id, one.sample) for one in found} == {(it.job_id, n) for it in handles for n in range(2)}
    assert len({nodes.node_of(name) for name in ("default", "default:1", "default:2", "default:3")}) > 1
    for one in found:
        check_scripted(one, 3)


async def test_the_loss_of_a_shard_stops_its_jobs_alone_until_it_is_back(
    redis_db: str, redis_server: EmbeddedRedis
) -> None:
    url = f"{redis_db},{redis_server.url}"
    engine = ScriptedEngine(tokens_per_s=100.0)
    async with RolloutClient(url) as client, worker(url, engine=engine, lease_s=2.0) as running:
        lost = await client.submit_many(
            [one for one in (tokens(sampling=LONG) for _ in range(40)) if shard_of(one.id, 2) == 1]
        )
        lease = running.worker._lease
        assert lease is not None
        await eventually(lambda: len(running.worker._held) == len(lost), what="all are held")
        redis_server.kill()
        await eventually(lambda: not running.status.held, what="its jobs are forgotten")
        assert lease.parts[1].in_doubt
        engine.tokens_per_s = 1e9
        for one in [one for one in (tokens() for _ in range(20)) if shard_of(one.id, 2) == 0]:
            assert len(await client.wait(await client.submit(one), 20)) == 1
        redis_server.restart()
        await eventually(lambda: not lease.parts[1].in_doubt, what="the shard is joined again")
        for one in [one for one in (tokens() for _ in range(20)) if shard_of(one.id, 2) == 1]:
            assert len(await asyncio.wait_for(client.wait(await client.submit(one)), 20)) == 1
        assert running.worker.worker_id == lease.worker_id, "it is the same worker all the time"


async def test_a_worker_that_may_not_record_the_layout_joins_a_shard_again(
    redis_db: str, redis_server: EmbeddedRedis
) -> None:
    limited = redis_server.url.replace("://", "://limited:secret@")
    async with RolloutClient(f"{redis_db},{redis_server.url}"), Redis.from_url(redis_server.url) as second:
        await second.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+@all", "-hsetnx")
        async with worker(f"{redis_db},{limited}") as running:
            leases, name = Keys("default", 1).workers, running.worker.worker_id
            assert await second.zrem(leases, name) == 1
            await eventually(lambda: second.zscore(leases, name), what="it holds a lease there again")


async def test_a_job_for_an_adapter_goes_back_while_another_shard_is_away(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own shard alone has to learn of the adapter."""
    job_id = next(one.id for one in iter(tokens, None) if shard_of(one.id, 3) == 2)
    given_back: list[str] = []

    async def away(*_: object) -> None:
        raise ConnectionError("gone")

    async def release(jobs: list[Release], _: int) -> None:
        given_back.extend(job.job_id for job in jobs)

    async def refusal(_: str) -> None:
        return None

    async def committed() -> dict[str, int]:
        return {"tuned": 3}

    async with worker(f"{redis_db}?shards=3") as running:
        lease, follower = running.worker._lease, running.worker._follower
        assert lease is not None
        assert follower is not None
        with monkeypatch.context() as patched:
            patched.setattr(lease.parts[1], "learn", away)
            patched.setattr(lease, "release", release)
            patched.setattr(follower.adapters, "refusal", refusal)
            patched.setattr(follower.adapters, "committed", committed)
            claim = Claim(job_id, 1, 1, 0.0, None, b"")
            await running.worker._refuse_or_release(claim, AdapterMissing("tuned", "it is not here"))
        assert given_back == [job_id]
        assert await lease.redis.hget(Keys("default", 2).weights, "adapter:tuned") == b"3"
