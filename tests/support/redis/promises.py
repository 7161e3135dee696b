"""Every call whose answer is a promise: with replicas or the disk to wait for, it is answered when they have it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from support.pools.pool import status
from support.specimens.messages import job, result, specimens

from rolloutmq.messages import Broker, Finished, Lease, Release, WeightAnnouncement
from rolloutmq.sync.transfer.ledger import Ledger


@dataclass
class Promises:
    """calls: one of each kind, for jobs of client "c" that worker "w" holds. Doing them again changes nothing."""

    broker: Broker
    lease: Lease
    ledger: Ledger
    finished: Finished
    announcement: WeightAnnouncement
    calls: list[Callable[[], Awaitable[Any]]]


async def promises(client: Redis) -> Promises:
    broker, lease, ledger = Broker(client, "p"), Lease(client, "p", "w"), Ledger(client, "p")
    jobs = [job(reply_to="c") for _ in range(6)]  # the last one is not claimed
    await broker.enqueue(jobs)
    await lease.join(status("w"))
    claims = {claim.job_id: claim for claim in await lease.claim(5, 5, 0)}
    finished = Finished(jobs[0].id, claims[jobs[0].id].attempt, 0, result(jobs[0]))
    announcement = specimens()["announcement"]
    assert isinstance(announcement, WeightAnnouncement)
    return Promises(
        broker,
        lease,
        ledger,
        finished,
        announcement,
        [
            lambda: broker.enqueue(jobs),  # known already: the one before may not be safe yet
            lambda: lease.complete([finished]),
            lambda: broker.cancel([jobs[1].id]),
            lambda: broker.cancel_client("c", jobs[1].group),
            lambda: broker.stop([jobs[5].id]),
            lambda: lease.release([Release(jobs[2].id, claims[jobs[2].id].attempt)], 3),
            lambda: lease.bury(jobs[3].id, claims[jobs[3].id].attempt, "cause", "host", "error"),
            lambda: lease.expire(jobs[4].id, claims[jobs[4].id].attempt),
            lambda: ledger.close(announcement, True, None, {}),
        ],
    )
