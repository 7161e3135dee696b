"""A job that is late or not wanted any more leaves the engine at once, not with the next heartbeat."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.pools.pool import Running, change, eventually, runs, shard_with, worker
from support.specimens.messages import tokens

from rolloutmq import JobFailed, RolloutClient, SamplingParams
from rolloutmq.messages.broker.lease import Lease
from rolloutmq.messages.errors import RedisUnavailable
from rolloutmq.worker.lease import Membership
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.worker import Worker

LONG = SamplingParams(max_new_tokens=1000)


def slow() -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=1.0)


def due(running: Running, job_id: str, in_s: float = 0.0) -> None:
    """Bring a running job's deadline forward: a short one might pass before the job runs."""
    deadline = time.monotonic() + in_s
    running.worker._held.get(job_id).deadline = deadline
    running.worker._deadlines.look(deadline)


async def no_news(*_: object) -> None:
    """What a worker makes of a heartbeat's answer here."""


async def for_ever(*_: object) -> None:
    await asyncio.Event().wait()


async def test_a_late_job_frees_its_slots_at_its_deadline(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No heartbeat tells the worker of it. A job that comes later may be due sooner."""
    monkeypatch.setattr(Worker, "_on_beat", no_news)
    engine = slow()
    async with worker(redis_db, engine=engine) as running:
        later = await client.submit(tokens(sampling=LONG, deadline_s=60.0))
        soon = await client.submit(tokens(sampling=LONG, deadline_s=50.0, n=3))
        await eventually(lambda: running.generation.running == 4)
        due(running, soon.job_id, 0.1)
        with pytest.raises(JobFailed, match="expired: its deadline passed while it was running"):
            await client.wait(soon)
        await eventually(lambda: runs(engine, 1))
        await client.cancel([later])
        await eventually(lambda: runs(engine, 0))


async def test_the_slots_are_free_even_if_redis_cannot_be_told(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis ends the job itself then; its client is told once."""

    async def silent(*_: object) -> bool:
        raise RedisUnavailable("no answer")

    monkeypatch.setattr(Lease, "expire", silent)
    monkeypatch.setattr(Worker, "_on_beat", no_news)
    engine = slow()
    async with worker(redis_db, engine=engine) as running:
        job = await client.submit(tokens(sampling=LONG, deadline_s=50.0))
        await eventually(lambda: runs(engine))
        due(running, job.job_id)
        await eventually(lambda: runs(engine, 0))
        part = shard_with(client.broker, job.job_id)
        await change(part, job.job_id, {"e": 1})
        await part.redis.zadd(part.keys.deadlines, {job.job_id: 1})
        with pytest.raises(JobFailed, match="expired"):
            await client.wait(job)
        assert (await client.load()).expired == 1


async def test_no_late_job_waits_until_redis_has_been_told_of_another(
    redis_db: str, client: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def frozen(self: Lease, job_id: str, *_: object) -> bool:
        told.append(job_id)
        await for_ever()
        return False

    monkeypatch.setattr(Lease, "expire", frozen)
    monkeypatch.setattr(Membership, "run", for_ever)
    engine = slow()
    async with worker(redis_db, engine=engine, drain_s=0.0) as running:
        jobs = [await client.submit(tokens(sampling=LONG, deadline_s=50.0)) for _ in range(2)]
        await eventually(lambda: runs(engine, 2))
        for in_s, job in enumerate(jobs):
            due(running, job.job_id, in_s / 10)
        await eventually(lambda: len(told) == 2)
        await eventually(lambda: runs(engine, 0))
