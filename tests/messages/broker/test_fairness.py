"""Priority classes: highest first, and still nobody waits for ever."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from support.specimens.messages import job

from rolloutmq.messages import Broker, Lease


async def claim_in_order(lease: Lease, kinds: dict[str, str], at_a_time: int, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        claims = await lease.claim(at_a_time, at_a_time, 0)
        assert claims
        found += [kinds[claim.job_id] for claim in claims]
    return found


async def queue(broker: Broker, **counts: int) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for priority, count in counts.items():
        jobs = [job(priority=priority) for _ in range(count)]
        await broker.enqueue(jobs)
        kinds |= {one.id: priority for one in jobs}
    return kinds


@pytest.mark.parametrize("at_a_time", [1, 7, 64])
async def test_lower_classes_get_a_share_under_an_endless_load_of_high(broker: Broker, joined, at_a_time: int) -> None:
    kinds = await queue(broker, low=100, normal=100, high=900)
    order = await claim_in_order(await joined(), kinds, at_a_time, 600)
    assert order[0] == "high"
    # One turn each for 8 of higher classes that went past; the first claim owes nothing yet.
    assert min(order.count("normal"), order.count("low")) >= (600 - 2 * at_a_time) // 10
    assert order.count("high") >= 450


async def test_a_class_that_has_nothing_waiting_saves_no_turns(broker: Broker, db: Redis, joined) -> None:
    lease = await joined()
    kinds = await queue(broker, high=300)
    await claim_in_order(lease, kinds, 50, 300)
    kinds = await queue(broker, low=10, high=10)
    assert (await claim_in_order(lease, kinds, 4, 4)) == ["high"] * 4


async def test_one_claim_is_bounded_in_bytes(broker: Broker, joined) -> None:
    text = "x" * (3 << 20)
    jobs = [job(token_ids=None, text=text) for _ in range(6)]
    for one in jobs:
        await broker.enqueue([one])
    lease = await joined()
    taken = [[claim.job_id for claim in await lease.claim(256, 256, 0)] for _ in range(2)]
    assert taken == [[one.id for one in jobs[:3]], [one.id for one in jobs[3:]]]
