"""Many real workers, of which some die at once: how long until others have all their jobs.

In real time. Workers are the real ones with the scripted engine, in a few processes. Those that are to die have
processes of their own, which are killed (SIGKILL).

`main` is one of these processes. It says so when all of its workers have joined, and ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from rolloutmq.messages.errors import InvalidField
from rolloutmq.messages.model import GenerateJob, SamplingParams
from rolloutmq.messages.redis import Keys, connect, text
from rolloutmq.producer.client import RolloutClient
from rolloutmq.worker.config import WorkerConfig
from rolloutmq.worker.scripted import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer
from rolloutmq.worker.worker import Worker

from ..broker.turn import BenchFailed
from .redis_watch import RedisWatch
from .timeline import spread

POOL = "deaths"
IN_ONE_PROCESS = 250
AT_A_TIME = 32
"""So many of a process start at the same time."""
SLOTS = 8
MAX_LOST = 20
"""A busy host may cost living workers a lease, too, which says nothing about a job."""
TOKENS_PER_S = 10.0
LOOK_S = 0.05


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
        watch, parts = RedisWatch(redis), list[Process]()
        await watch.begin()
        try:
            began = time.monotonic()
            doomed = len(_shares(plan.killed))
            for count in (*_shares(plan.killed), *_shares(plan.workers - plan.killed)):
                parts.append(await _part(url, count, plan))
            for part in parts:
                await _joined(part)
            all_joined_s = time.monotonic() - began
            say(f"{plan.workers} workers have joined after {all_joined_s:.1f} s")
            handles = await client.submit_many(_job(plan) for _ in range(plan.jobs))
            job_ids = [handle.job_id for handle in handles]
            await _until_held(redis, job_ids, set())
            dead = {str(part.pid) for part in parts[:doomed]}
            lost = await _not_held(redis, job_ids, dead)
            say(f"{plan.jobs} jobs run; {len(lost)} of them are with the {plan.killed} workers that die now")
            for part in parts[:doomed]:
                part.kill()
            recovery = spread(await _until_held(redis, lost, dead))
            say(f"the last one runs again after {recovery.get('max', 0.0):.1f} s; the lease is {plan.lease_s:g} s")
            results = Counter[str]()
            async for outcome in client.results(timeout=4 * plan.sample_s + 60.0):
                results[outcome.job_id] += outcome.ok
            if set(results) != set(job_ids) or set(results.values()) != {1}:
                raise BenchFailed(f"{len(results)} of {plan.jobs} jobs have results, at most {max(results.values())}")
            cpu_s, figures = await watch.spent_s(), await watch.figures()
        finally:
            await asyncio.gather(*(_end(part) for part in parts))
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
    keys = Keys(POOL)
    async with redis.pipeline(transaction=False) as pipe:
        for job_id in job_ids:
            pipe.hmget(keys.job(job_id), "st", "w")
        found = zip(job_ids, await pipe.execute(), strict=True)
    return [
        job_id for job_id, (state, owner) in found if state == b"q" or (state == b"r" and _process(text(owner)) in dead)
    ]


async def _until_held(redis: Any, job_ids: Sequence[str], dead: Set[str]) -> list[float]:
    """Seconds from now until each of these jobs is with a worker that lives, or has ended."""
    began, left, took = time.monotonic(), list(job_ids), list[float]()
    while left:
        still = await _not_held(redis, left, dead)
        took += [time.monotonic() - began] * (len(left) - len(still))
        left = still
        await asyncio.sleep(LOOK_S if left else 0)
    return took


def _shares(count: int) -> list[int]:
    """How many workers each process has."""
    return [min(IN_ONE_PROCESS, count - first) for first in range(0, count, IN_ONE_PROCESS)]


async def _part(url: str, count: int, plan: Deaths) -> Process:
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", code, url, str(count), str(plan.lease_s)]
    return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)


async def _joined(part: Process) -> None:
    assert part.stdout is not None
    if not await part.stdout.readline():
        raise BenchFailed(f"process {part.pid} with workers did not start")


async def _end(part: Process) -> None:
    assert part.stdin is not None
    part.stdin.close()
    await part.wait()


async def _serve(url: str, count: int, lease_s: float) -> None:
    ended, starting = asyncio.Event(), asyncio.Semaphore(AT_A_TIME)
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    config = WorkerConfig(redis_url=url, pool=POOL, max_running=SLOTS, prefetch=0, lease_s=lease_s, max_lost=MAX_LOST)
    serving: list[asyncio.Task[None]] = []

    async def one() -> None:
        async with starting:
            worker = Worker(config, ScriptedEngine(TOKENS_PER_S, echo=True), NoTokenizer())
            task = asyncio.create_task(worker.run())
            serving.append(task)
            joined = asyncio.create_task(worker.joined.wait())
            await asyncio.wait({task, joined}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()

    await asyncio.gather(*(one() for _ in range(count)))
    print("joined", flush=True)
    over = asyncio.create_task(ended.wait())
    done, _ = await asyncio.wait({over, *serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in done - {over}:
        task.result()  # a worker only ends with an error


def main() -> None:
    """A process with workers: they serve until its input ends."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
