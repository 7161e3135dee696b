"""The counters of what has happened in a pool."""

from __future__ import annotations

from support.pools.fixtures import MakeLease
from support.specimens.messages import job

from rolloutmq.messages import Broker
from rolloutmq.messages.broker import Release


async def test_claims_are_counted_and_those_of_a_job_that_another_had(broker: Broker, joined: MakeLease) -> None:
    await broker.enqueue([job(), job(), job()])
    first = await joined("w1")
    claims = await first.claim(2, 2, 0)
    load = await broker.load()
    assert (load.attempts, load.redelivered, load.leases_lost) == (2, 0, 0)
    await first.release([Release(claims[0].job_id, claims[0].attempt)], 3)
    await (await joined("w2")).claim(8, 8, 0)
    load = await broker.load()
    assert (load.attempts, load.redelivered, load.leases_lost) == (4, 1, 0)


async def test_a_lease_that_runs_out_is_counted_and_one_that_is_given_up_is_not(
    broker: Broker, joined: MakeLease, expire_lease: object
) -> None:
    await broker.enqueue([job()])
    silent, other, leaver = await joined("w1"), await joined("w2"), await joined("w3")
    await silent.claim(1, 1, 0)
    await leaver.leave()
    await expire_lease(silent)  # type: ignore[operator]
    await other.reap(3)
    assert (await broker.load()).leases_lost == 1
    await other.claim(1, 1, 0)
    assert (await broker.load()).redelivered == 1
