"""Many at once: workers that die together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from support.pools.pool import status

from rolloutmq.messages import Lease

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
        leases = [Lease(broker.redis, POOL, f"crowd-{number}", chaos.lease_s) for number in range(WORKERS)]
        for number, lease in enumerate(leases):
            await lease.join(status(lease.worker_id))
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


async def _beat(leases: Sequence[Lease]) -> None:
    for lease in leases:
        await lease.heartbeat(status(lease.worker_id))
