"""A client of a pool with two shards, of which one is full and the other is not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.pools.pool import worker
from support.specimens.messages import tokens

from rolloutmq import GenerateJob, PoolBusy, RolloutClient, WaitTimeout
from rolloutmq.messages import Caps
from rolloutmq.messages.redis import shard_of
from rolloutmq.producer.calls.batch import generate
from rolloutmq.producer.sending import enqueued, send_all

pytestmark = pytest.mark.one_shard


@pytest.fixture
async def narrow(redis_db: str) -> AsyncIterator[RolloutClient]:
    """Each of the two shards has room for one job."""
    async with RolloutClient(f"{redis_db}?shards=2", client_id="client", caps=Caps(jobs=2)) as client:
        yield client


def in_shards(*shards: int) -> list[GenerateJob]:
    return [next(one for one in iter(tokens, None) if shard_of(one.id, 2) == shard) for shard in shards]


async def test_jobs_that_are_in_are_not_sent_again() -> None:
    sent: list[list[str]] = []

    class Full:
        async def enqueue(self, jobs: Sequence[GenerateJob], frames: Any) -> list[str]:
            sent.append([job.id for job in jobs])
            if len(sent) == 1:
                raise PoolBusy("full", ["new"], "jobs", frozenset({2}))
            return ["new"] * len(jobs)

    jobs = [tokens() for _ in range(4)]
    send = partial(enqueued, Full())  # type: ignore[arg-type]
    assert await send_all(send, jobs, None) == ["new", "new", "q", "new"]
    assert sent == [[job.id for job in jobs], [jobs[1].id, jobs[3].id]]


async def test_map_submits_each_job_until_it_is_accepted_and_not_again(
    redis_db: str, narrow: RolloutClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever submits a job again whose results were taken long ago has it run again."""
    accepted: list[str] = []

    async def noted(enqueue: Any, jobs: Sequence[GenerateJob], *more: Any, **told: Any) -> list[str]:
        try:
            states: list[str] = await enqueue(jobs, *more, **told)
        except PoolBusy as busy:
            accepted.extend(job.id for place, job in enumerate(jobs) if place < busy.accepted or place in busy.beyond)
            raise
        accepted.extend(job.id for job in jobs)
        return states

    for broker in (narrow.broker, *narrow.broker.parts):  # a call with jobs of one shard goes to that alone
        monkeypatch.setattr(broker, "enqueue", partial(noted, broker.enqueue))
    jobs = in_shards(0, 0, 1, 0, 1)
    async with worker(f"{redis_db}?shards=2"):
        found = [one.job_id async for one in narrow.map(jobs, timeout=20)]
    assert sorted(found) == sorted(accepted) == sorted(job.id for job in jobs)


async def test_a_batch_that_ends_gives_up_what_is_in_behind_a_full_shard(narrow: RolloutClient) -> None:
    jobs = in_shards(0, 0, 1)
    with pytest.raises(WaitTimeout):
        await generate(narrow._core, jobs, 0.3)
    states = await narrow.broker.states([job.id for job in jobs])
    assert list(states.values()) == ["cancelled", "", "cancelled"]
    assert narrow.outstanding == 0
