"""A client that tells its journal what it was promised and handed, and goes on through faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import RedisError

from rolloutmq import GenerateJob, RolloutClient, SamplingParams

from .adapters import NEWEST_DEMANDED
from .journal import Journal
from .worker_process import tell

STUCK_S = 90.0
"""Whoever waits longer than this, through all faults, waits for ever."""


class Taker:
    """A client of this process, and what it was handed."""

    def __init__(self, client: RolloutClient, book: Journal, seed: str, adapters: Sequence[str] = ()) -> None:
        """adapters: names of LoRA adapters, one of which samples a part of the jobs."""
        self.client, self._book, self.rng = client, book, random.Random(seed)
        self._adapters = adapters
        self.taken = 0
        self.stopping = asyncio.Event()

    def job(self, **fields: Any) -> GenerateJob:
        tokens = self.rng.choice((1, 5, 20, 20, 60, 150))
        prompt = [self.rng.randrange(500) for _ in range(self.rng.randint(1, 30))]
        made: dict[str, Any] = {
            "token_ids": prompt,
            "sampling": SamplingParams(max_new_tokens=tokens),
            "n": self.rng.randint(1, 4),
        }
        if self.rng.random() < 0.2:
            made["priority"] = self.rng.choice(("high", "low"))
        if self._adapters and self.rng.random() < 0.4:
            made |= {"lora": self.rng.choice(self._adapters)}
            made |= {"min_adapter_version": self.rng.randint(0, NEWEST_DEMANDED)}
        return GenerateJob(**(made | fields))

    async def submit(self, jobs: list[GenerateJob]) -> list[Any]:
        """Handles. What a trainer does with an error it cannot interpret: the same jobs again."""
        handles = await again(lambda: self.client.submit_many(jobs, timeout=STUCK_S))
        for job in jobs:
            self._book.submitted(job, self.client.client_id)
        return list(handles)

    def received(self, outcomes: Iterable[Any]) -> None:
        for outcome in outcomes:
            self._book.received(outcome, self.client.client_id)
            self.taken += 1
            if self.taken % 100 == 0:
                tell(taken=100)

    async def take_all(self) -> None:
        """Everything outstanding."""
        async for outcome in self.client.results(STUCK_S):
            self.received([outcome])

    async def go(self, rounds: Callable[[Taker], Awaitable[None]]) -> None:
        """Rounds of this kind until it is time to stop; whatever else one raises is trouble."""
        while not self.stopping.is_set():
            try:
                await rounds(self)
            except (RedisError, OSError) as error:
                if isinstance(error, TimeoutError):  # WaitTimeout is one
                    raise
                await asyncio.sleep(0.1)


async def again(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer, once Redis gives one."""
    while True:
        try:
            return await ask()
        except (RedisError, ConnectionError):
            await asyncio.sleep(0.1)
