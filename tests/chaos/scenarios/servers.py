"""A Redis that dies, freezes or is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from ..context import Chaos, Trainer
from ..scenario import scenario
from .network import submit_until_accepted


@scenario("kill_redis_and_restart", lossless=True, lease_s=3.0)
async def kill_redis(chaos: Chaos) -> None:
    """SIGKILL of the server under load, three times, each time it starts again from its append-only file."""
    await chaos.start_workers(2, max_running=64, tokens_per_s=100)
    async with chaos.client() as trainer:
        submitting = asyncio.create_task(submit_batches(chaos, trainer, 30))
        for _ in range(3):
            await trainer.take_at_least(chaos.rng.randint(30, 90))
            chaos.redis.kill()
            at = time.monotonic()
            await asyncio.to_thread(chaos.redis.start)
            await trainer.take_at_least(1)
            chaos.recovered_s = max(chaos.recovered_s or 0.0, time.monotonic() - at)
        await submitting
        await trainer.take()


@scenario("freeze_redis_past_lease", lease_s=1.0)
async def freeze_redis(chaos: Chaos) -> None:
    """The server answers nobody for two leases: every worker gives its own up, and no job is lost between them."""
    await chaos.start_workers(2, max_running=64, tokens_per_s=40)
    async with chaos.client() as trainer:
        submitting = asyncio.create_task(submit_batches(chaos, trainer, 20))
        await trainer.take_at_least(chaos.rng.randint(10, 60))
        os.kill(chaos.redis.pid, signal.SIGSTOP)
        at = time.monotonic()
        await asyncio.sleep(2 * chaos.lease_s)  # how long it is frozen
        os.kill(chaos.redis.pid, signal.SIGCONT)
        await trainer.take_at_least(1)
        chaos.notes["silent_s"] = round(time.monotonic() - at, 2)
        await submitting
        taken = await trainer.take()
        chaos.expect(any(one.attempt > 1 for one in taken), "no lease ended: the freeze was for nothing")


async def submit_batches(chaos: Chaos, trainer: Trainer, batches: int) -> None:
    """Submit 8 jobs at a time, whatever becomes of the server meanwhile."""
    for _ in range(batches):
        await submit_until_accepted(trainer, chaos.jobs(8, n=chaos.rng.randint(1, 4), tokens=chaos.rng.randint(5, 60)))
        await asyncio.sleep(0.05)  # the pace of this trainer
