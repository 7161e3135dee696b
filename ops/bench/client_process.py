"""The client of a benchmark, in a process of its own as a trainer is: `python -m … URL POOL WORKLOAD-JSON`."""

from __future__ import annotations

import asyncio
import json
import sys
import time

from ...messages.model import RolloutResult
from ...producer.client import RolloutClient
from .workload import Workload


async def run_client(url: str, pool: str, workload: Workload) -> dict[str, float]:
    """Submit everything, take everything; seconds from the first submission to the last result."""
    jobs = workload.jobs()
    tokens = samples = 0
    async with RolloutClient(url, pool) as client:
        began = time.perf_counter()
        await client.submit_many(jobs)
        async for outcome in client.results(timeout=120):
            if not isinstance(outcome, RolloutResult):
                raise SystemExit(str(outcome))
            tokens += len(outcome.token_ids)
            samples += 1
        seconds = time.perf_counter() - began
    return {"tokens": tokens, "samples": samples, "seconds": seconds}


if __name__ == "__main__":
    url, pool, spec = sys.argv[1:]
    print(json.dumps(asyncio.run(run_client(url, pool, Workload(**json.loads(spec))))))
