"""`python -m benchmarks turns`: conversations through the server of a verl replica, with and without its stickiness.

The figure: how much of the prompts the engines found in their prefix caches. What could have been found of a prompt is
the prompt and the answer of the turn before, and of a first one the system prompt that all conversations share.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from rolloutmq.ops.demo.pool import PoolSettings, Workers
from rolloutmq.ops.redis import EmbeddedRedis
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.producer import RolloutClient
from rolloutmq.producer.calls import LastWorkers
from rolloutmq.producer.verl import PoolServer
from rolloutmq.producer.verl import PoolSettings as VerlSettings

from .episodes import ANSWER, OBSERVATION, SYSTEM, TASK, all_serve
from .harness import Run, option, turns

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "max_tokens": ANSWER, "ignore_eos": True}
"""Of a request, as verl's agent loops send them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run."""

    conversations: int = option(144, "Conversations in each leg.", min=2)
    turns: int = option(6, "Answers in each.", min=2)
    concurrency: int = option(48, "Conversations at the same time.", min=2)
    workers: int = option(3, "Workers.", min=2)
    running: int = option(16, "Answers at the same time on each of them.", min=1)
    rounds: int = option(2, "Times that each leg runs, in turn.", min=1)
    prefer_s: float = option(30.0, "How long a turn waits for its worker, in seconds.", name="prefer", min=0.01)


class Forgetful(LastWorkers):
    """Remembers no worker: what the server would be without stickiness."""

    def note(self, conversation: Any, worker: str) -> None: ...


def measure(plan: Plan, run: Run) -> dict[str, Any]:
    """Conversations through verl's server, on several workers: the prefix cache with and without stickiness."""
    with tempfile.TemporaryDirectory() as scratch, EmbeddedRedis() as server:
        model = Path(scratch, "model")
        write_tiny_model(model, context=1024)
        settings = PoolSettings(server.url, "bench", model, Path(scratch), plan.running, prefix_cache=True)
        with Workers(settings) as workers:
            for _ in range(plan.workers):
                workers.start()
            return asyncio.run(_measure(plan, server.url, workers, run))


async def _measure(plan: Plan, url: str, workers: Workers, run: Run) -> dict[str, Any]:
    async with RolloutClient(url, "bench") as client:
        await all_serve(client, workers, run)
    kinds = {"sticky": LastWorkers, "without": Forgetful}
    sums = {name: [0, 0, 0] for name in kinds}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    await _leg(plan, url, LastWorkers(), "warm up", plan.concurrency)
    for number, order in turns(list(kinds), plan.rounds):
        for name in order:
            run.say(f"round {number}: {name}")
            began = time.perf_counter()
            found = await _leg(plan, url, kinds[name](), f"{name} {number}", plan.conversations)
            seconds[name].append(round(time.perf_counter() - began, 1))
            sums[name] = [one + more for one, more in zip(sums[name], found, strict=True)]
    legs = {name: _figures(*sums[name]) | {"seconds": seconds[name]} for name in kinds}
    return asdict(plan) | legs


async def _leg(plan: Plan, url: str, workers: LastWorkers, seed: str, count: int) -> list[int]:
    """So many conversations through a server of their own. Returns the sums of `_talk`."""
    settings = VerlSettings(redis_url=url, pool="bench", prefer_s=plan.prefer_s)
    server = PoolServer(settings, prompt_length=1024, response_length=ANSWER)
    server._workers = workers
    gate = asyncio.Semaphore(plan.concurrency)
    talks = await asyncio.gather(*(_talk(server, gate, f"{seed}/{it}", plan.turns) for it in range(count)))
    await server.aclose()
    return [sum(each) for each in zip(*talks, strict=True)]


async def _talk(server: PoolServer, gate: asyncio.Semaphore, seed: str, turns: int) -> tuple[int, int, int]:
    """Tokens of prompts, those that a cache could have had, and those that it had."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    ids = [it % 256 for it in range(SYSTEM)] + tokens(TASK)
    known, prompts, could, had = SYSTEM, 0, 0, 0
    async with gate:
        for _ in range(turns):
            output = await server.generate(ids, PARAMS, uuid4().hex)
            prompts, could, had = prompts + len(ids), could + known, had + output["extra_fields"]["num_cached_tokens"]
            known = len(ids) + len(output["token_ids"])
            ids += output["token_ids"] + tokens(OBSERVATION)
    return prompts, could, had


def _figures(prompts: int, could: int, had: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompts,
        "prefix_cache_hit_rate": round(had / prompts, 4),
        "of_what_could_be_found": round(had / could, 4),
    }
