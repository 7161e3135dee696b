"""Redis' CPU time for a job and for a heartbeat while 1, 10, 100, 1,000 workers hold 256 jobs each.

The leases are real; two processes hold all of them over a few connections. Only Redis' own CPU time (`INFO cpu`)
counts, so a slow driver does not matter. The pool is filled first. Then workers take turns to claim and publish, and
the client takes what came, while every worker renews its lease and reaps once a second. All counts of workers are
measured with the same batches, so the results differ only by what the pool holds.

`beat_on_time` is the second process, which beats until its input ends. It answers each line with the number of
heartbeats so far.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rolloutmq.messages.broker import Broker, Caps, Claim, Finished, Lease
from rolloutmq.messages.model import RolloutResult, Segment, WorkerStatus
from rolloutmq.messages.redis import connect

from ..parts import Part, busy_s
from .ours import TOKENS, jobs_of

POOL, CLIENT = "growth", "growth-client"
LEASE_S = 60.0
BEAT_S = 1.0
MAX_LOST = 3
LANES = 8
BATCH = 16
"""Jobs per claim, publication and acknowledgement: as many as one worker of many has ready at a time."""
HELD_EACH = 256
BACKLOG = 2048
"""Jobs that wait in the queue during the measurement."""


Cost = dict[str, float]
"""Microseconds of Redis' CPU, without the server's own housekeeping, named as in the result.

A lifecycle is submit, claim, publish, read and acknowledge. A heartbeat includes the look for dead workers. jobs_held
counts those of all workers. Rates are of the measured interval. Each worker should have one heartbeat a second.
"""


def fleet(redis: Any, workers: int) -> list[Lease]:
    """Return leases for that many workers. They have not joined yet."""
    return [Lease(redis, POOL, f"growth-{number:04d}", LEASE_S) for number in range(workers)]


def status(lease: Lease) -> WorkerStatus:
    return WorkerStatus(worker_id=lease.worker_id, host="growth", pid=1, state="serving", version=0)


async def beat(lease: Lease) -> None:
    """Do what a worker does once a second: renew its lease, and look for dead workers."""
    await lease.heartbeat(status(lease))
    await lease.reap(MAX_LOST)


def beat_on_time(url: str, workers: int) -> None:
    """The second process."""
    asyncio.run(_beat_on_time(url, workers))


async def _beat_on_time(url: str, workers: int) -> None:
    beats, ended = 0, asyncio.Event()

    async def lane(mine: list[Lease]) -> None:
        nonlocal beats
        at = time.monotonic()
        while True:
            for lease in mine:
                at += BEAT_S / len(mine)
                if (pause := at - time.monotonic()) > 0:
                    await asyncio.sleep(pause)
                await beat(lease)
                beats += 1

    def asked() -> None:
        if sys.stdin.readline():
            print(beats, flush=True)
        else:
            ended.set()

    async with connect(url) as redis:
        leases = fleet(redis, workers)
        asyncio.get_running_loop().add_reader(sys.stdin, asked)
        lanes = [asyncio.create_task(lane(leases[start::LANES])) for start in range(min(LANES, workers))]
        over = asyncio.create_task(ended.wait())
        done, _ = await asyncio.wait([over, *lanes], return_when=asyncio.FIRST_COMPLETED)
        for task in [over, *lanes]:
            task.cancel()
        for task in done:
            task.result()  # a lane only ends with an error


async def measure_growth(url: str, workers: int, *, lifecycles: int) -> Cost:
    """Measure the cost with `workers` workers of HELD_EACH jobs. The Redis at `url` is emptied before and after."""
    async with connect(url) as redis:
        await redis.flushall()
        await redis.script_flush()
        crowd = _Crowd(redis, workers)
        await crowd.join()
        with Part(beat_on_time, url, workers) as beats:
            _beats(beats)  # waits until the process is up
            await crowd.fill()
            await crowd.turn_over(lifecycles // 4)  # loads scripts and warms up allocators
            beaten, began, used = _beats(beats), time.perf_counter(), await _cpu_us(redis)
            await crowd.turn_over(lifecycles)
            spent, seconds = await _cpu_us(redis) - used, time.perf_counter() - began
            meanwhile = _beats(beats) - beaten
        idle, count = await _idle_us_per_s(redis), max(16, lifecycles // 2)
        began, used = time.perf_counter(), await _cpu_us(redis)
        for number in range(count):
            await beat(crowd.leases[number % workers])
        heartbeat = (await _cpu_us(redis) - used - idle * (time.perf_counter() - began)) / count
        spent -= idle * seconds
        memory = (await redis.info("memory"))["used_memory"] / 1e6
        await redis.flushall()
    return {
        "redis_us_per_lifecycle": round((spent - meanwhile * heartbeat) / lifecycles, 2),
        "redis_us_per_heartbeat": round(heartbeat, 2),
        "jobs_held": workers * HELD_EACH,
        "redis_us_per_lifecycle_with_heartbeats": round(spent / lifecycles, 2),
        "heartbeats_per_s": round(meanwhile / seconds, 1),
        "lifecycles_per_s": round(lifecycles / seconds, 1),
        "redis_memory_mb": round(memory, 1),
    }


def _beats(part: Part) -> int:
    part.tell()
    return int(part.line())


async def _cpu_us(redis: Any) -> float:
    return 1e6 * busy_s(await redis.info("cpu"))


async def _idle_us_per_s(redis: Any) -> float:
    """Return the server's own CPU time per second, without any command."""
    began, used = time.perf_counter(), await _cpu_us(redis)
    await asyncio.sleep(1.0)
    return (await _cpu_us(redis) - used) / (time.perf_counter() - began)


class _Crowd:
    """The workers' leases, the jobs that each holds, and the client that they work for."""

    def __init__(self, redis: Any, workers: int) -> None:
        self._broker = Broker(redis, POOL, Caps(jobs=1 << 24, nbytes=1 << 36))
        self.leases = fleet(redis, workers)
        self._held: list[deque[Claim]] = [deque() for _ in self.leases]
        self._submitted = 0
        self._last = "0"
        self._turn = 0

    async def join(self) -> None:
        for lease in self.leases:
            await lease.join(status(lease))

    async def _submit(self, count: int) -> None:
        self._submitted += count
        await self._broker.enqueue(jobs_of(range(self._submitted - count, self._submitted), CLIENT))

    async def fill(self) -> None:
        """Fill the queue with the backlog, and let every worker claim its share."""
        await self._submit(BACKLOG)
        for lease, held in zip(self.leases, self._held, strict=True):
            while len(held) < HELD_EACH:
                await self._submit(min(HELD_EACH - len(held), 256))
                held.extend(await lease.claim(min(HELD_EACH - len(held), 256), 1 << 20, 0))

    async def turn_over(self, lifecycles: int) -> None:
        """Run whole lifecycles, a batch per worker in turn. New jobs replace them, so as many stay held and queued."""
        done = 0
        while done < lifecycles:
            lease, held = self.leases[self._turn], self._held[self._turn]
            self._turn = (self._turn + 1) % len(self.leases)
            batch = [held.popleft() for _ in range(min(BATCH, lifecycles - done, len(held)))]
            await self._submit(len(batch))
            await lease.complete([finished(claim, lease.worker_id) for claim in batch])
            held.extend(await lease.claim(len(batch), len(batch), 0))
            replies = await self._broker.read_replies(CLIENT, self._last, count=512)
            if len(replies) != len(batch):
                raise SystemExit(f"{len(replies)} results of {len(batch)} jobs")
            await self._broker.ack(CLIENT, replies)
            self._last = replies[-1].entry_id
            done += len(batch)


_ANSWER = np.arange(TOKENS, dtype=np.int32)
_LOGPROBS = np.full(TOKENS, -1.0, np.float32)


def finished(claim: Claim, worker_id: str) -> Finished:
    """Return the job's one sample, as an engine would have made it."""
    result = RolloutResult(
        job_id=claim.job_id,
        sample=0,
        n=1,
        group_id=claim.job_id,
        token_ids=_ANSWER,
        logprobs=_LOGPROBS,
        finish_reason="length",
        segments=(Segment(0, TOKENS),),
        worker_id=worker_id,
        attempt=claim.attempt,
    )
    return Finished(claim.job_id, claim.attempt, 0, result)


async def growth(url: str, counts: Sequence[int], lifecycles: int, say: Callable[[str], None]) -> dict[int, Cost]:
    """Return the cost at each number of workers, smallest first."""
    costs: dict[int, Cost] = {}
    for workers in sorted(counts):
        costs[workers] = cost = await measure_growth(url, workers, lifecycles=lifecycles)
        us, beat_us = cost["redis_us_per_lifecycle"], cost["redis_us_per_heartbeat"]
        say(f"{workers} workers: {us} µs of Redis per lifecycle, {beat_us} µs per heartbeat")
    return costs
