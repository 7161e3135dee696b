"""Clients of one class take turns, counted in samples; a job keeps its turn wherever it waits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.fixtures import MakeLease
from support.specimens.messages import job

from rolloutmq.messages import Broker, GenerateJob, InvalidField, Lease, Release
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


async def test_turns_are_counted_in_samples(broker: Broker, joined: MakeLease) -> None:
    await submit(broker, "groups", 50, n=4)
    await submit(broker, "singles", 200)
    given = Counter(await order(broker, await joined(), 160))
    assert abs(given["groups"] - given["singles"]) <= 8


async def test_clients_with_one_label_are_one_tenant(broker: Broker, joined: MakeLease) -> None:
    for client in ("run/a", "run/b", "alone"):
        await submit(broker, client, 100)
    given = Counter(await order(broker, await joined(), 80))
    assert abs(given["run/a"] + given["run/b"] - given["alone"]) <= 1


async def test_a_client_that_comes_late_makes_up_for_nothing(broker: Broker, joined: MakeLease) -> None:
    lease = await joined()
    await submit(broker, "first", 200)
    await order(broker, lease, 96)
    await submit(broker, "late", 100)
    given = Counter(await order(broker, lease, 40))
    assert abs(given["first"] - given["late"]) <= 2


async def test_a_returned_job_is_the_first_of_its_client(broker: Broker, joined: MakeLease) -> None:
    one, other = await joined("w1"), await joined("w2")
    mine, _ = await submit(broker, "a", 20), await submit(broker, "b", 20)
    back = (await one.claim(4, 4, 0))[0]
    await order(broker, other, 10)
    await one.release([Release(back.job_id, back.attempt)], 3)
    assert (await other.claim(1, 1, 0))[0].job_id == back.job_id == mine[0].id


async def test_what_waits_aside_takes_turns_with_the_queue(broker: Broker, joined: MakeLease) -> None:
    old, new = await joined("old"), await joined("new")
    await submit(broker, "a", 40, min_version=1)
    assert await old.claim(1, 1, 0) == [], "all are set aside"
    await submit(broker, "b", 40)
    given = Counter(await order(broker, new, 40, version=1))
    assert abs(given["a"] - given["b"]) <= 2


async def test_what_nobody_ran_is_not_the_clients_turn(broker: Broker, joined: MakeLease) -> None:
    lease = await joined()
    await submit(broker, "other", 100)
    await submit(broker, "hasty", 1000)
    await broker.cancel_client("hasty")
    await submit(broker, "hasty", 5)
    assert Counter(await order(broker, lease, 12))["hasty"] == 5


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
