"""Pools that are commanded: jobs that run long enough to be disturbed."""

from __future__ import annotations

from typing import Any

from support.pools.pool import Running, check_scripted, eventually, wait_replies
from support.specimens.messages import job

from rolloutmq.messages import Broker, SamplingParams
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG = SamplingParams(max_new_tokens=300)


def slow(**settings: Any) -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=200.0, **settings)


async def busy(broker: Broker, running: Any, count: int = 3) -> list[Any]:
    """Jobs that run, each for 1.5 seconds of the engine's clock."""
    jobs = [job(sampling=LONG) for _ in range(count)]
    await broker.enqueue(jobs)
    await eventually(lambda: running.generation.running == count, what="all run")
    return jobs


def hurry(running: Running) -> None:
    """What runs ends now, with all its tokens, and so does what begins from now on."""
    running.engine.tokens_per_s = 1e9
    running.engine.abort_all()


async def all_done(broker: Broker, jobs: list[Any], prompt: int = 3) -> None:
    """Every job once, with the tokens it must have."""
    found = await wait_replies(broker, len(jobs))
    assert {reply.outcome.job_id for reply in found} == {each.id for each in jobs}
    for reply in found:
        check_scripted(reply.outcome, prompt)
