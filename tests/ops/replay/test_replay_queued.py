"""Jobs that wait in a pool are copied and generated elsewhere; the pool does not notice."""

from __future__ import annotations

from support.pools.pool import check_scripted, dump

from rolloutmq.messages import Broker, GenerateJob, SamplingParams, connect, new_id
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
