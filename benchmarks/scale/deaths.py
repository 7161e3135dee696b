"""Many real workers, of which some die at once: how long until others have all their jobs.

In real time. Workers are the real ones with the scripted engine, in a few processes. Those that are to die have
processes of their own, which are killed (SIGKILL).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from rolloutmq.messages.broker import read_jobs
from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model import GenerateJob, SamplingParams
from rolloutmq.messages.redis import Keys, connect, text
from rolloutmq.producer.client import RolloutClient

from .. import crowd
from ..parts import BenchFailed, Part
from .redis_watch import RedisWatch
from .timeline import spread

POOL = "deaths"
IN_ONE_PROCESS = 250
SLOTS = 8
MAX_LOST = 20
"""A busy host may cost living workers a lease, too, which says nothing about a job."""
TOKENS_PER_S = 10.0
LOOK_S = 0.05
CONFIG = {"pool": POOL, "max_running": SLOTS, "prefetch": 0, "max_lost": MAX_LOST}


@dataclass(frozen=True, slots=True)
class Deaths:
    """workers: how many join. killed: how many of them die. lease_s: the workers' lease. sample_s: length of each job,
    all of which are under way at the deaths. There are as many as the survivors can hold."""

    workers: int = 500
    killed: int = 250
    lease_s: float = 10.0
    sample_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.killed < self.workers:
            raise InvalidField("kill", self.killed, f"1 to {self.workers - 1} of {self.workers} workers")

    @property
    def jobs(self) -> int:
        """How many jobs."""
        return (self.workers - self.killed) * SLOTS


async def measure_deaths(url: str, plan: Deaths, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds from the kill until each job of a killed worker is claimed again, and Redis' slowest calls.

    Raises BenchFailed if a worker does not join, or an outcome is missing or there twice.
    """
    async with connect(url) as redis, RolloutClient(url, POOL) as client:
        watch = RedisWatch(redis)
        await watch.begin()
        with ExitStack() as stack:
            began, config = time.monotonic(), CONFIG | {"redis_url": url, "lease_s": plan.lease_s}
            dying = crowd.shares(plan.killed, IN_ONE_PROCESS)
            counts = [*dying, *crowd.shares(plan.workers - plan.killed, IN_ONE_PROCESS)]
            engine = {"tokens_per_s": TOKENS_PER_S}
            parts = [stack.enter_context(Part(crowd.work, count, config, engine)) for count in counts]
            for part in parts:
                await asyncio.to_thread(part.line)
            all_joined_s = time.monotonic() - began
            say(f"{plan.workers} workers have joined after {all_joined_s:.1f} s")
            handles = await client.submit_many(_job(plan) for _ in range(plan.jobs))
            job_ids = [handle.job_id for handle in handles]
            await _until_held(redis, job_ids, set())
            dead = {str(part.pid) for part in parts[: len(dying)]}
            lost = await _not_held(redis, job_ids, dead)
            say(f"{plan.jobs} jobs run; {len(lost)} of them are with the {plan.killed} workers that die now")
            for part in parts[: len(dying)]:
                part.kill()
            recovery = spread(await _until_held(redis, lost, dead))
            say(f"the last one runs again after {recovery.get('max', 0.0):.1f} s; the lease is {plan.lease_s:g} s")
            results = Counter[str]()
            async for outcome in client.results(timeout=4 * plan.sample_s + 60.0):
                results[outcome.job_id] += outcome.ok
            if set(results) != set(job_ids) or set(results.values()) != {1}:
                raise BenchFailed(f"{len(results)} of {plan.jobs} jobs have results, at most {max(results.values())}")
            cpu_s, figures = await watch.spent_s(), await watch.figures()
    return {
        **asdict(plan),
        "jobs": plan.jobs,
        "jobs_of_the_dead": len(lost),
        "recovery_s": recovery,
        "results": len(results),
        "results_twice": client.repeats,
        "all_joined_s": round(all_joined_s, 2),
        "redis": {"cpu_s": round(cpu_s, 3), **figures},
    }


def _job(plan: Deaths) -> GenerateJob:
    return GenerateJob(token_ids=[1, 2, 3], sampling=SamplingParams(max_new_tokens=round(plan.sample_s * TOKENS_PER_S)))


def _process(worker_id: str) -> str:
    """The process of a worker: <host>-<pid>-<random>."""
    return worker_id.rsplit("-", 2)[-2] if worker_id.count("-") >= 2 else ""


async def _not_held(redis: Any, job_ids: Sequence[str], dead: Set[str]) -> list[str]:
    """Those of these jobs that are in the queue, or with a worker of a dead process."""
    found = zip(job_ids, await read_jobs(redis, Keys(POOL), job_ids, "state", "owner"), strict=True)
    waits = {job_id: its for job_id, its in found if its.get("state") in (b"q", b"r")}
    return [it for it, its in waits.items() if its["state"] == b"q" or _process(text(its.get("owner"))) in dead]


async def _until_held(redis: Any, job_ids: Sequence[str], dead: Set[str]) -> list[float]:
    """Seconds from now until each of these jobs is with a worker that lives, or has ended."""
    began, left, took = time.monotonic(), list(job_ids), list[float]()
    while left:
        still = await _not_held(redis, left, dead)
        took += [time.monotonic() - began] * (len(left) - len(still))
        left = still
        await asyncio.sleep(LOOK_S if left else 0)
    return took
