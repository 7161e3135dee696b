"""The prompts of a benchmark: seeded, of spread lengths, and the same for every side."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...messages.model import GenerateJob, SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """count prompts of 16 to 64 random tokens; each answer has a fixed length between half of max_new_tokens and all
    of it, end-of-sequence ignored, so that both sides generate the very same number of tokens."""

    count: int
    max_new_tokens: int
    vocab_size: int
    seed: int = 0

    def jobs(self) -> list[GenerateJob]:
        """The workload as jobs, in order."""
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
        """Tokens that every run of it generates."""
        return sum(job.sampling.max_new_tokens for job in self.jobs())
