"""Jobs that wait in a pool are copied and generated elsewhere; the pool does not notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.pools.pool import check_scripted, dump

from rolloutmq.messages import Broker, GenerateJob, SamplingParams, connect, new_id
from rolloutmq.messages.broker import read_jobs
from rolloutmq.messages.redis import Keys
from rolloutmq.ops.replay import queued
from rolloutmq.ops.replay.queued import answers, waiting
from rolloutmq.producer import RolloutClient
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.text import NoTokenizer

SHORT = SamplingParams(max_new_tokens=5)


async def test_copies_of_waiting_jobs_are_generated_and_the_pool_stays_as_it_is(redis_db: str) -> None:
    tokens = GenerateJob(id=new_id(), token_ids=[1, 2, 3], n=2, sampling=SHORT)
    later = GenerateJob(id=new_id(), token_ids=[4], sampling=SHORT, min_version=7, priority="low")
    text = GenerateJob(id=new_id(), text="Hello", sampling=SHORT)
    async with RolloutClient(redis_db) as client, connect(redis_db) as redis:
        await client.submit_many([tokens, text, later])
        before, broker = await dump(redis), Broker(redis, "default")
        claims = await waiting(broker, 10)
        assert [claim.job_id for claim in await waiting(broker, 2)] == [tokens.id, text.id]
        engine = ScriptedEngine()
        await engine.start()
        found = {answer.job_id: answer for answer in await answers(claims, engine, NoTokenizer(), 3)}
        assert await dump(redis) == before
    assert len(found) == 3
    for result in (*found.pop(tokens.id).results, *found.pop(later.id).results):
        check_scripted(result, 3 if result.job_id == tokens.id else 1)
        assert result.versions == (3,)
    assert "no tokenizer" in found.pop(text.id).problem


async def test_broken_records_are_passed_over_and_no_more_is_read_than_asked_for(
    redis_db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["normal"] * 4 + ["low"] * 3
    jobs = [GenerateJob(id=new_id(), token_ids=[1], sampling=SHORT, priority=it) for it in kinds]
    looked_at: list[str] = []
    async with RolloutClient(redis_db) as client, connect(redis_db) as redis:
        await client.submit_many(jobs)
        broker = Broker(redis, "default")

        async def counted(redis: Any, keys: Keys, job_ids: Sequence[str], *names: str) -> Any:
            looked_at.extend(job_ids)
            return await read_jobs(redis, keys, job_ids, *names)

        await redis.set(broker.keys.job(jobs[0].id), "no hash")
        await redis.hset(broker.keys.job(jobs[1].id), "n", "many")
        await redis.zadd(broker.keys.queues[2], {b"\xff": -1})
        claims = await waiting(broker, 10)
        monkeypatch.setattr(queued, "read_jobs", counted)
        assert [claim.job_id for claim in await waiting(broker, 4)] == [one.id for one in jobs[1:5]]
        engine = ScriptedEngine()
        await engine.start()
        found = {answer.job_id: answer for answer in await answers(claims, engine, NoTokenizer(), 0)}
    assert looked_at == [one.id for one in jobs[:5]], "the others' payloads are not fetched"
    assert "n=1" in found.pop(jobs[1].id).problem
    assert [len(answer.results) for answer in found.values()] == [1] * 5
