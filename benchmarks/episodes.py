"""`python -m benchmarks episodes`: many episodes on two workers, one of which is killed in the middle.

The figures: how much of the prompts the engines found in their prefix caches, the longest time that an episode made no
progress, and how many tokens were generated twice at most.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolloutmq.messages.errors import EngineError
from rolloutmq.messages.model import RolloutResult, SamplingParams
from rolloutmq.ops.demo.pool import PoolSettings, Workers
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.producer import Episode, RolloutClient

from .harness import Run, option

SYSTEM, TASK, ANSWER, OBSERVATION = 64, 16, 32, 16
"""Tokens of the system prompt, which all episodes share, of each task, each answer, and each observation."""
KILL_AT = 0.4
"""The share of all answers after which a worker is killed."""
START_S = 180.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    episodes: int = option(200, "Episodes in all.", min=4)
    turns: int = option(4, "Answers in each.", min=2)
    concurrency: int = option(24, "Episodes at the same time.", min=2)
    lease_s: float = option(3.0, "The workers' lease in seconds.", name="lease", min=1.0)
    stream: bool = option(False, "Save answers under way every 50 ms, as streams do.")


@dataclass(slots=True)
class Clock:
    """What all environments tell: the seconds of every answer so far. due: set when there are `kill_at` of them."""

    kill_at: int
    waits: list[float] = field(default_factory=list)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, seconds: float) -> None:
        self.waits.append(seconds)
        if len(self.waits) == self.kill_at:
            self.due.set()


class Talk:
    """Random tokens as observations, for a number of turns."""

    def __init__(self, seed: int, turns: int, clock: Clock) -> None:
        self._draw, self._left, self._clock = random.Random(seed), turns, clock
        self._since = 0.0

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(256) for _ in range(count)]

    async def reset(self) -> list[int]:
        self._since = time.perf_counter()
        return [it % 256 for it in range(SYSTEM)] + self._tokens(TASK)

    async def step(self, _answer: RolloutResult) -> tuple[list[int], float, bool, dict[str, Any]]:
        now = time.perf_counter()
        self._clock.answered(now - self._since)
        self._since, self._left = now, self._left - 1
        return self._tokens(OBSERVATION), 0.0, self._left == 0, {}

    async def close(self) -> None:
        """Nothing is open."""


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Episodes on two workers with the tiny model, one of which is killed: prefix cache, stalls, tokens lost."""
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as server:
        model = Path(scratch, "model")
        write_tiny_model(model, context=1024)
        half = plan.concurrency // 2  # so that both workers have episodes, whichever is faster
        settings = PoolSettings(server.url, "bench", model, Path(scratch), half, plan.lease_s, prefix_cache=True)
        with Workers(settings) as workers:
            for _ in range(2):
                workers.start()
            return asyncio.run(_measure(plan, server.url, workers, run))


async def _measure(plan: Plan, url: str, workers: Workers, run: Run) -> dict[str, Any]:
    async with RolloutClient(url, "bench") as client:
        await all_serve(client, workers, run)
        await _play(client, plan, plan.concurrency, seed=1 << 20, clock=Clock(0))  # warms up
        before = await _generated(client, plan, workers)
        clock, began = Clock(int(KILL_AT * plan.episodes * plan.turns)), time.perf_counter()
        playing = asyncio.create_task(_play(client, plan, plan.episodes, seed=0, clock=clock))
        killing = asyncio.create_task(clock.due.wait())
        await asyncio.wait({playing, killing}, return_when=asyncio.FIRST_COMPLETED)
        undisturbed = list(clock.waits)
        victim = next(iter(workers.all.values()))
        victim.kill()
        run.say(f"killed {victim.name} after {len(undisturbed)} answers")
        episodes = await playing
        seconds = time.perf_counter() - began
        ((survivor, after),) = (await _generated(client, plan, workers)).items()
    own = {survivor: after - before[survivor]}
    return _figures(plan, episodes, undisturbed, clock.waits, own) | {"seconds": round(seconds, 1)}


async def _generated(client: RolloutClient, plan: Plan, workers: Workers) -> dict[str, int]:
    """What each living worker has generated. It tells that in its heartbeats, several of which come within a lease."""
    await asyncio.sleep(plan.lease_s)
    # One that had nothing to do when it was killed holds nobody up, and may be listed for a moment longer.
    while len(found := await client.workers()) > sum(it.alive for it in workers.all.values()):
        workers.check()
        await asyncio.sleep(0.1)
    return {it.worker_id: it.generated_tokens for it in found}


async def all_serve(client: RolloutClient, workers: Workers, run: Run) -> None:
    """Wait until all of them do. Raises EngineError."""
    run.say("starting workers")
    deadline = time.monotonic() + START_S
    while [it.state for it in await client.workers()].count("serving") < len(workers.all):
        workers.check()
        if time.monotonic() > deadline:
            raise EngineError(f"the workers did not start within {START_S:g} s")
        await asyncio.sleep(0.1)


async def _play(client: RolloutClient, plan: Plan, count: int, seed: int, clock: Clock) -> list[Episode]:
    sampling = SamplingParams(max_new_tokens=ANSWER, ignore_eos=True)
    seeds = range(seed, seed + count)
    found = client.episodes(
        seeds,
        lambda it: Talk(it, plan.turns, clock),
        concurrency=plan.concurrency,
        sampling=sampling,
        stream=plan.stream,
    )
    return [episode async for episode in found]


def _figures(
    plan: Plan,
    episodes: list[Episode],
    undisturbed: list[float],
    waits: list[float],
    own: dict[str, int],
) -> dict[str, Any]:
    """What came of it. own: the worker that is left, and the tokens that it generated."""
    ((survivor, survivor_tokens),) = own.items()
    results = [turn.result for episode in episodes for turn in episode.turns]
    tokens = sum(len(it.token_ids) for it in results)
    moved = [it for it in results if it.attempt > 1]
    alone = sum(len(it.token_ids) for it in results if it.attempt == 1 and it.worker_id == survivor)
    prompts = sum(len(it.prompt_ids) for it in results if it.prompt_ids is not None)
    # An upper bound: all that the survivor generated of answers that were under way on the killed worker, from where
    # they had been saved. What the killed worker had generated beyond that, it told nobody.
    twice = max(0, survivor_tokens - alone)
    return {
        "episodes": len(episodes),
        "done": sum(it.stop == "done" for it in episodes),
        "turns": plan.turns,
        "concurrency": plan.concurrency,
        "stream": plan.stream,
        "answers": len(results),
        "tokens": tokens,
        "prompt_tokens": prompts,
        "prefix_cache_hit_rate": round(sum(it.cached_tokens for it in results) / prompts, 4),
        "lease_s": plan.lease_s,
        "longest_answer_s": round(max(waits), 3),
        "longest_answer_before_the_kill_s": round(max(undisturbed), 3),
        "median_answer_s": round(float(np.median(waits)), 3),
        "answers_moved": len(moved),
        "tokens_twice_at_most": twice,
        "tokens_twice_share_at_most": round(twice / tokens, 4),
        "workers_per_episode_at_most": max(len({it.result.worker_id for it in one.turns}) for one in episodes),
    }
