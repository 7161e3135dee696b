"""Requests with a key: the same answer for each repeat, and nothing generated twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.specimens.messages import result

from rolloutmq import GenerateJob
from rolloutmq.messages import connect
from rolloutmq.messages.redis import PoolRedis
from rolloutmq.ops.gateway.requests import KeyReused, Request, Requests

OWNER = "acme/gw-1"


@pytest.fixture
async def redis(redis_db: str) -> AsyncIterator[PoolRedis]:
    async with connect(redis_db, pool="default") as opened:
        yield opened


@pytest.fixture
async def requests(redis: PoolRedis) -> Requests:
    made = Requests(redis, "default")
    await redis.hset(made.keys.gateways, OWNER, "")
    return made


async def begin(requests: Requests, key: str = "k", digest: bytes = b"body", **more: Any) -> Request:
    return await requests.begin("acme", key, digest, OWNER, **more)


def answer(request: Request, n: int = 1) -> list[list[Any]]:
    jobs = [GenerateJob(id=job_id, token_ids=[5, 6], n=n) for job_id in request.job_ids]
    return [[result(job, sample) for sample in range(n)] for job in jobs]


async def test_a_repeat_gets_the_answer(requests: Requests) -> None:
    first = await begin(requests)
    again = await begin(requests)
    assert (first.state, again.state, again.id, again.job_ids) == ("new", "running", first.id, first.job_ids)
    waiting = asyncio.create_task(requests.wait(again, 30))
    given = answer(first, n=2)
    assert await requests.finish(first, given) is given
    assert await waiting == given
    third = await begin(requests)
    assert (third.state, third.answer) == ("done", given)


async def test_another_body_is_refused(requests: Requests) -> None:
    first = await begin(requests)
    with pytest.raises(KeyReused, match="another body"):
        await begin(requests, digest=b"other")
    await requests.finish(first, answer(first))
    with pytest.raises(KeyReused):
        await begin(requests, digest=b"other")
