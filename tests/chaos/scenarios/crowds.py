"""Many at once: workers that die together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from support.pools.pool import status

from rolloutmq.messages import Broker, Lease
from rolloutmq.messages.broker import ShardedLease

from ..context import POOL, Chaos
from ..scenario import scenario

WORKERS = 500


@dataclass(frozen=True)
class Gone:
    """A worker of the driver's own, of which nothing will be heard again."""

    id: str


@scenario("five_hundred_workers_die", lease_s=3.0)
async def crowd(chaos: Chaos) -> None:
    """500 workers with one job each are never heard of again; the one that is left has all of their jobs in time."""
    async with chaos.client() as trainer, chaos.broker() as broker:
        jobs = chaos.jobs(WORKERS, tokens=5)
        await trainer.submit(jobs)
        leases = [_lease(broker, f"crowd-{number}", chaos.lease_s) for number in range(WORKERS)]
        for number, lease in enumerate(leases):
            for part in lease.parts:
                await part.join(status(lease.worker_id))
            claimed = await lease.claim(1, 1, 0)
            chaos.expect(len(claimed) == 1, f"{lease.worker_id} claimed {len(claimed)} jobs")
            if number % 100 == 0:
                await _beat(leases[:number])  # a busy machine needs longer than a lease for all of them
        starting = asyncio.create_task(chaos.worker(max_running=2 * WORKERS, tokens_per_s=100))
        while not starting.done():
            await _beat(leases)
        starting.result()
        began = time.monotonic()
        for lease in leases:
            await _beat([lease])
            chaos.gone(Gone(lease.worker_id))
        chaos.notes["last_beats_s"] = round(time.monotonic() - began, 2)
        await trainer.take()


def _lease(broker: Broker, worker_id: str, lease_s: float) -> Lease:
    its = {"lease_s": lease_s, "shards": len(broker.parts)}
    parts = [Lease(part.redis, POOL, worker_id, shard=shard, **its) for shard, part in enumerate(broker.parts)]
    return ShardedLease(parts) if len(parts) > 1 else parts[0]


async def _beat(leases: Sequence[Lease]) -> None:
    for part in (part for lease in leases for part in lease.parts):
        await part.heartbeat(status(part.worker_id))
