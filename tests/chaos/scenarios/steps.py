"""The clock of Redis' host steps, or the next server's host has another one."""

from __future__ import annotations

import asyncio
import time

from rolloutmq import JobFailure
from rolloutmq.messages import Broker

from ..context import Chaos, until
from ..looks import HasId, held, left
from ..scenario import scenario
from .failover import ONE_PAIR, PRIMARY, fail_over, make_replica

HOUR = 3600.0
MINUTES = 600.0
ALLOWED_S = 2.0
"""Recovery after a step takes at most this, and the lease."""


def _step(name: str, seconds: float) -> None:
    @scenario(f"redis_clock_steps_{name}", lease_s=2.0, bent=True, timeout_s=90.0)
    async def steps(chaos: Chaos) -> None:
        """The clock steps by an hour while jobs run, and again just as a worker dies: nobody loses a lease over it,
        nothing expires early, what the dead worker held runs again in time, and deadlines are kept."""
        victim = await chaos.worker(max_running=64, tokens_per_s=20)
        async with chaos.client() as trainer, chaos.broker() as broker:
            late = chaos.jobs(4, tokens=100_000, deadline_s=8.0)
            jobs = [*chaos.jobs(24, n=2, tokens=chaos.rng.randint(40, 80)), *chaos.jobs(8, tokens=60, deadline_s=600.0)]
            began = time.monotonic()
            await trainer.submit([*jobs, *late])
            await until(lambda: _holds(broker, victim, len(jobs)), what="the worker to hold them")
            chaos.host.clock_s += seconds
            await asyncio.sleep(2 * chaos.lease_s)  # long enough for whoever would take the step for silence
            chaos.expect(len(victim.all("joined")) == 1, "a worker lost its lease over a step")
            heirs = await chaos.start_workers(2, max_running=128, tokens_per_s=400)
            back = len(await held(broker, victim.id))
            await victim.kill()
            died = time.monotonic()
            chaos.host.clock_s += seconds
            await until(lambda: left(broker, victim.id), 60.0, what="the dead worker's jobs to be taken back")
            took = time.monotonic() - died
            chaos.notes |= {"back_s": round(took, 2), "jobs_back": back}
            allowed = chaos.lease_s + ALLOWED_S
            chaos.expect(took <= allowed, f"its jobs were back after {took:.1f} s, allowed are {allowed:g} s")
            taken = await trainer.take()
            expired_s = time.monotonic() - began
        expired = {one.job_id for one in taken if isinstance(one, JobFailure)}
        chaos.expect(
            expired == {job.id for job in late}, f"{len(expired)} jobs failed, {len(late)} deadlines were over"
        )
        chaos.expect(expired_s < 8.0 + 2 * allowed, f"deadlines of 8 s were over after {expired_s:.1f} s")
        chaos.expect(all(len(one.all("joined")) == 1 for one in heirs), "a worker lost its lease over a step")


_step("forward", HOUR)
_step("back", -HOUR)


def _another_clock(name: str, seconds: float) -> None:
    @scenario(f"failover_to_a_clock_{name}", lease_s=2.0, config=PRIMARY, timeout_s=90.0, one_redis=ONE_PAIR)
    async def another_clock(chaos: Chaos) -> None:
        """The promoted replica's host has another time. Deadlines of five minutes are not over; the jobs of a worker
        that dies then run again as soon as ever."""
        proxy = await chaos.proxy()
        url = f"{proxy.url}?min_replicas=1"
        pair = await make_replica(chaos, clock_s=seconds)
        victim, _ = await chaos.start_workers(2, url, max_running=64, tokens_per_s=50)
        async with chaos.client(url) as trainer:
            await trainer.submit(chaos.jobs(16, tokens=1000, deadline_s=300.0))
            await fail_over(chaos, proxy, trainer, pair)
            before = victim.id
            await victim.kill()
            died = time.monotonic()
            async with chaos.broker() as broker:
                await until(lambda: left(broker, before), 30.0, what="the dead worker's jobs to be taken back")
                chaos.notes["back_s"] = round(time.monotonic() - died, 2)
                allowed = chaos.lease_s + ALLOWED_S
                chaos.expect(chaos.notes["back_s"] <= allowed, f"back after {chaos.notes['back_s']} s, not {allowed} s")
                await trainer.take()
                expired = await broker.redis.hget(broker.keys.load, "expired")
        chaos.expect(int(expired or 0) == 0, f"{expired!r} jobs expired long before their deadlines")


_another_clock("ahead", MINUTES)
_another_clock("behind", -MINUTES)


async def _holds(broker: Broker, worker: HasId, at_least: int) -> bool:
    return len(await held(broker, worker.id)) >= at_least
