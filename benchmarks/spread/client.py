"""The client of `benchmarks/spread/pool.py`, in a process of its own: it submits a case's jobs and takes the results.

It says "ready", reads the moment at which to begin (time.monotonic), and says when it has all results.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np

from rolloutmq.messages.broker import Broker
from rolloutmq.messages.broker.submissions import batches
from rolloutmq.messages.model import GenerateJob, RolloutResult, SamplingParams
from rolloutmq.messages.redis import connect

from .load import MOST, PROMPT, Case, arrivals

POOL, CLIENT = "spread", "spread-client"
STUCK_S = 120.0
"""Real seconds without a result after which a run has failed."""


def jobs_of(case: Case) -> list[tuple[float, GenerateJob, tuple[int, ...]]]:
    """The jobs of a case: when each comes, and the lengths of its samples. They have the same ids in every process."""
    sampling, prompt = SamplingParams(max_new_tokens=MOST), np.zeros(PROMPT, np.int32)
    return [
        (
            one.at,
            GenerateJob(id=f"{i:032x}", token_ids=prompt, n=case.n, sampling=sampling, reply_to=CLIENT),
            one.lengths,
        )
        for i, one in enumerate(arrivals(case))
    ]


async def _submit(broker: Broker, waves: dict[float, list[Any]], began: float, stretch: float) -> None:
    for at, every in waves.items():
        await asyncio.sleep(max(0.0, began + at * stretch - time.monotonic()))
        await broker.accept(every)


async def _take(broker: Broker, reader: Any, samples: int) -> None:
    """Take all results, each once."""
    got: set[tuple[str, int]] = set()
    after = "0"
    while len(got) < samples:
        replies = []
        async with asyncio.timeout(STUCK_S):
            while not replies:
                replies = await broker.read_replies(CLIENT, after, block_ms=20_000, redis=reader)
        await broker.ack(CLIENT, replies)
        after = replies[-1].entry_id
        for reply in replies:
            if not isinstance(reply.outcome, RolloutResult):
                raise SystemExit(f"not a result: {reply.outcome}")
            sample = reply.outcome.job_id, reply.outcome.sample
            if sample in got:
                raise SystemExit(f"twice: {sample}")
            got.add(sample)


def drive(url: str, case: dict[str, Any]) -> None:
    """The client's process."""
    asyncio.run(_drive(url, Case(**case)))


async def _drive(url: str, case: Case) -> None:
    redis = connect(url, pool=POOL)
    broker = Broker(redis, POOL)
    waves: dict[float, list[GenerateJob]] = {}
    for at, job, _ in jobs_of(case):
        waves.setdefault(at, []).append(job)
    encoded = {at: list(batches(jobs, broker.caps.payload)) for at, jobs in waves.items()}
    print("ready", flush=True)
    began = float(sys.stdin.readline())
    taking = asyncio.create_task(_take(broker, redis.reader(1), case.samples))
    await _submit(broker, encoded, began, case.stretch)
    await taking
    print("done", flush=True)
