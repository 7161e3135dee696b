"""Clients of one class take turns, counted in samples; a job keeps its turn wherever it waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, InvalidField, Lease
from rolloutmq.messages.ids import check_client_id

pytestmark = pytest.mark.one_shard


async def submit(broker: Broker, client: str, count: int, **fields: Any) -> list[GenerateJob]:
    jobs = [job(reply_to=client, **fields) for _ in range(count)]
    await broker.enqueue(jobs)
    return jobs


async def order(broker: Broker, lease: Lease, samples: int, at_a_time: int = 8, version: int = 0) -> list[str]:
    """The clients of the jobs that are given next, as often as they have samples."""
    found: list[str] = []
    while len(found) < samples and (claims := await lease.claim(at_a_time, at_a_time, version)):
        for one in claims:
            client = await broker.redis.hget(broker.keys.job(one.job_id), "y")
            found += [client.decode()] * one.n
    return found


@pytest.mark.parametrize("at_a_time", [1, 7, 64])
async def test_a_backlog_of_one_client_holds_up_no_other(broker: Broker, joined: MakeLease, at_a_time: int) -> None:
    lease = await joined()
    await submit(broker, "large", 1000)
    await order(broker, lease, 64, at_a_time)
    await submit(broker, "small", 10)
    assert Counter(await order(broker, lease, 21 + at_a_time, at_a_time))["small"] == 10


async def test_clients_with_one_label_are_one_tenant(broker: Broker, joined: MakeLease) -> None:
    for client in ("run/a", "run/b", "alone"):
        await submit(broker, client, 100)
    given = Counter(await order(broker, await joined(), 80))
    assert abs(given["run/a"] + given["run/b"] - given["alone"]) <= 1


async def test_a_tenant_keeps_its_turn_while_another_of_its_clients_has_jobs(broker: Broker, joined: MakeLease) -> None:
    lease = await joined()
    await submit(broker, "other", 200)
    await submit(broker, "run/a", 50)
    await submit(broker, "run/b", 50)
    await broker.cancel_client("run/b")
    await submit(broker, "run/b", 50)
    given = Counter(await order(broker, lease, 80))
    assert given["run/a"] + given["run/b"] <= 42


async def test_turns_behind_the_newest_are_forgotten(broker: Broker, joined: MakeLease, db: Redis) -> None:
    lease = await joined()
    for client in range(50):
        await submit(broker, f"c{client}", 1)
    turns = broker.keys.turns[1]
    assert await db.zcard(turns) == 50
    await order(broker, lease, 50)
    await lease.reap(3)
    assert await db.exists(turns) == 0


@pytest.mark.parametrize("client", ["a/b/c", "/a", "a/", "a" * 129, f"{'a' * 64}/{'b' * 64}"])
def test_a_client_has_one_label_at_most(client: str) -> None:
    with pytest.raises(InvalidField, match="behind a label"):
        check_client_id("client_id", client)
    check_client_id("client_id", f"{'a' * 64}/{'b' * 63}")
