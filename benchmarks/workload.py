"""The prompts of a benchmark, the same for every side, and its client."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rolloutmq.messages.model import GenerateJob, LogitProcessor, RolloutResult, SamplingParams
from rolloutmq.producer.client import RolloutClient

from .traces import traces_on

PROCESSORS: dict[str, dict[str, Any]] = {
    "action_mask": {"token_ids": list(range(200))},
    "disallowed_tokens": {"token_ids": list(range(200))},
    "temperature_schedule": {"points": [[0, 1.2], [64, 0.8]]},
}
"""Logit processors by name, as every job of a workload with one has them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of a benchmark: `count` of them, each with 16 to 64 random tokens.

    Each answer has a fixed length between half of max_new_tokens and all of it, and ignores the end of sequence. So
    both sides generate the same number of tokens. traces: whether the client makes spans. processor: a name of
    PROCESSORS that every job has; "" for none.
    """

    count: int
    max_new_tokens: int
    vocab_size: int
    seed: int = 0
    traces: bool = False
    processor: str = ""

    def jobs(self) -> list[GenerateJob]:
        """Return the workload as jobs, in order."""
        draw = random.Random(self.seed)
        shortest = max(1, self.max_new_tokens // 2)
        processors = [LogitProcessor(name=name, params=PROCESSORS[name]) for name in (self.processor,) if name]
        return [
            GenerateJob(
                token_ids=[draw.randrange(self.vocab_size) for _ in range(draw.randint(16, 64))],
                sampling=SamplingParams(max_new_tokens=draw.randint(shortest, self.max_new_tokens), ignore_eos=True),
                logit_processors=processors,
            )
            for _ in range(self.count)
        ]

    @property
    def tokens(self) -> int:
        """Return the number of tokens that every run generates."""
        return sum(job.sampling.max_new_tokens for job in self.jobs())


def run_client(url: str, pool: str, workload: dict[str, Any]) -> None:
    """A client's process: it submits all jobs and takes all results, and prints what they took."""
    given = Workload(**workload)
    with traces_on() if given.traces else nullcontext():
        print(json.dumps(asyncio.run(_run(url, pool, given))))


async def _run(url: str, pool: str, workload: Workload) -> dict[str, float]:
    """Returns tokens, and seconds and CPU seconds from the first submission to the last result."""
    jobs = workload.jobs()
    tokens = 0
    async with RolloutClient(url, pool) as client:
        began, cpu = time.perf_counter(), time.process_time()
        await client.submit_many(jobs)
        async for outcome in client.results(timeout=120):
            if not isinstance(outcome, RolloutResult):
                raise SystemExit(str(outcome))
            tokens += len(outcome.token_ids)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return {"tokens": tokens, "seconds": seconds, "cpu": cpu}
