"""Reading a pool in which keys are broken, or too many things are."""

from __future__ import annotations

from typing import cast

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.pools.pool import status
from support.specimens.messages import tokens

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker, connect
from rolloutmq.messages.broker import broker_of
from rolloutmq.messages.redis import Keys, PoolRedis
from rolloutmq.ops.gateway.pauses import Pauses
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.diagnosis import read_pool, reasons

KEYS = ("weights", "holders", "starting", "clock")


@pytest.mark.one_shard
@pytest.mark.parametrize("name", KEYS)
async def test_a_key_of_a_wrong_type_hides_nothing_else(
    name: str, broker: Broker, db: Redis, joined: MakeLease, client: RolloutClient
) -> None:
    await joined("w1", state="paused", blocks=("pause",))
    await client.submit(tokens())
    await db.delete(key := getattr(Keys("default"), name))
    await db.set(key, "garbage")
    found = reasons(await read_pool(broker))
    assert [it.cause for it in found] == ["paused"]


@pytest.mark.one_shard
async def test_garbage_in_a_hash_hides_nothing_else(
    broker: Broker, db: Redis, joined: MakeLease, client: RolloutClient
) -> None:
    await joined("w1", state="paused", blocks=("pause",))
    await client.submit(tokens())
    for name in ("weights", "holders", "starting"):
        mapping = dict.fromkeys(("", "committed", "open", "highest", "w", "adapter:x"), b"\xff {")
        await db.hset(getattr(broker.keys, name), mapping=mapping)
    await db.hset(broker.keys.load, "busy", b"\xff\xff x")
    assert [it.cause for it in reasons(await read_pool(broker))] == ["paused"]


@pytest.mark.one_shard
async def test_a_step_of_redis_clock_ends_no_lease(broker: Broker, db: Redis, joined: MakeLease) -> None:
    """Where it has stepped forward by less than the pool's clock corrects, `seen` stays behind for good."""
    lease = await joined("w1")
    await db.hincrby(broker.keys.clock, "seen", -12_000)
    await lease.heartbeat(status("w1"))
    assert [it.worker_id for it in (await read_pool(broker)).alive] == ["w1"]


@pytest.mark.one_shard
async def test_a_tenant_that_has_paused_is_seen(broker: Broker, db: Redis) -> None:
    await Pauses(cast("PoolRedis", db), "default").set("a", True)
    await db.hset(broker.keys.paused, "b", "1")  # by an older gateway, which does not say since when
    reading = await read_pool(broker)
    assert reading.tenants == {"a": pytest.approx(reading.at, abs=5)}


async def test_a_replica_is_read_all_the_same(redis_server: EmbeddedRedis) -> None:
    async with connect(redis_server.url, pool="default") as client:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        reading = await read_pool(broker_of(client, "default"))
    assert reading.refuses == {0: "Redis takes no writes: it is a replica"}


@pytest.mark.one_shard
async def test_a_reading_costs_the_same_whatever_waits(broker: Broker, db: Redis, client: RolloutClient) -> None:
    async def commands() -> int:
        await db.config_resetstat()
        await read_pool(broker)
        return sum(one["calls"] for one in (await db.info("commandstats")).values())

    await client.submit(tokens())
    before = await commands()
    await client.submit_many([tokens(min_version=version) for version in range(300)])
    assert await commands() <= before + 3
