"""The prompts of a benchmark, the same for every side, and its client: `python -m … URL POOL WORKLOAD-JSON`."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass

from ...messages.model import GenerateJob, RolloutResult, SamplingParams
from ...producer.client import RolloutClient


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of a benchmark: `count` of them, each with 16 to 64 random tokens.

    Each answer has a fixed length between half of max_new_tokens and all of it, and ignores the end of sequence. So
    both sides generate the same number of tokens. journal: a folder for the client's journal, "" for none.
    """

    count: int
    max_new_tokens: int
    vocab_size: int
    seed: int = 0
    journal: str = ""

    def jobs(self) -> list[GenerateJob]:
        """Return the workload as jobs, in order."""
        draw = random.Random(self.seed)
        shortest = max(1, self.max_new_tokens // 2)
        return [
            GenerateJob(
                token_ids=[draw.randrange(self.vocab_size) for _ in range(draw.randint(16, 64))],
                sampling=SamplingParams(max_new_tokens=draw.randint(shortest, self.max_new_tokens), ignore_eos=True),
            )
            for _ in range(self.count)
        ]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that every run generates."""
        return sum(job.sampling.max_new_tokens for job in self.jobs())


async def run_client(url: str, pool: str, workload: Workload) -> dict[str, float]:
    """Submit all jobs and take all results.

    Returns tokens, and seconds from the first submission to the last result.
    """
    jobs = workload.jobs()
    tokens = samples = 0
    async with RolloutClient(url, pool, journal=workload.journal or None) as client:
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
