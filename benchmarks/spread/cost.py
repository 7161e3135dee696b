"""What a job costs Redis at equal jobs per claim. `benchmarks/spread` runs one of these for each commit, in turns.

It reads from each line of its input the number of jobs per claim, and how many times 256 jobs, and says what they took:
µs of Redis' processor time for a job's enqueue, claim, complete and ack.
"""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from rolloutmq.messages.broker import Broker, Lease
from rolloutmq.messages.broker.submissions import batches
from rolloutmq.messages.ids import new_id
from rolloutmq.messages.model import GenerateJob, SamplingParams, WorkerStatus
from rolloutmq.messages.redis import connect
from rolloutmq.ops.redis import EmbeddedRedis

from ..broker.growth import finished
from ..parts import busy_s

POOL, CLIENT = "cost", "cost-client"
WAITING = 256
"""Jobs that are submitted together."""
TOKENS = np.zeros(16, np.int32)


def cost_us() -> None:
    """The process."""
    with EmbeddedRedis() as server:
        asyncio.run(_measure(server.url))


async def _measure(url: str) -> None:
    async with connect(url, pool=POOL) as redis:
        broker, lease = Broker(redis, POOL), Lease(redis, POOL, "w", 600.0)
        if hasattr(lease, "holds"):
            lease.holds, lease.pace = lambda: 0, lambda: 200.0  # so that its share is computed
        status = WorkerStatus(worker_id="w", host="h", pid=1, state="serving", version=0)
        await lease.join(status)
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            each, rounds = map(int, line.split())
            made = [_jobs(broker) for _ in range(rounds)]
            await lease.heartbeat(status)
            before = busy_s(await redis.info("cpu"))
            for jobs in made:
                await _turn(broker, lease, jobs, each)
            spent = busy_s(await redis.info("cpu")) - before
            print(1e6 * spent / (WAITING * rounds), flush=True)


def _jobs(broker: Broker) -> list[object]:
    sampling = SamplingParams(max_new_tokens=16)
    jobs = [GenerateJob(id=new_id(), token_ids=TOKENS, sampling=sampling, reply_to=CLIENT) for _ in range(WAITING)]
    return list(batches(jobs, broker.caps.payload))


async def _turn(broker: Broker, lease: Lease, jobs: list[object], each: int) -> None:
    await broker.accept(jobs)
    for _ in range(WAITING // each):
        claims = await lease.claim(each, each, 0)
        if len(claims) != each:
            raise SystemExit(f"a claim for {each} jobs gave {len(claims)}")
        await lease.complete([finished(claim, "w") for claim in claims])
    await broker.ack(CLIENT, await broker.read_replies(CLIENT, "0", count=WAITING))
