"""generate_stream: chunks of every sample in order, together what generate returns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from redis.asyncio import Redis
from support.pools.pool import eventually, worker
from support.pools.skyrl import check_output, engine, joined

from rolloutmq.messages import Broker, JobFailed
from rolloutmq.producer.skyrl import StreamingChunk
from rolloutmq.worker.scripted.engine import ScriptedEngine


async def test_chunks_of_several_prompts_and_samples(redis_db: str) -> None:
    batch: Any = {
        "prompt_token_ids": [[1], [1, 2], [1, 2, 3]],
        "sampling_params": {"max_tokens": 40, "n": 2, "logprobs": 0},
    }
    async with (
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=100), max_running=4),
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=100), max_running=4),
        engine(redis_db) as it,
    ):
        await joined(it, 2)
        chunks: dict[int, list[StreamingChunk]] = {}
        async for chunk in it.generate_stream(batch):
            chunks.setdefault(chunk["index"], []).append(chunk)
    assert sorted(chunks) == list(range(6))
    assert max(len(found) for found in chunks.values()) > 2  # it came bit by bit
    for found in chunks.values():
        last = found[-1]
        assert [chunk["is_finished"] for chunk in found] == [False] * (len(found) - 1) + [True]
        assert last["stop_reason"] == "length"
        assert "".join(chunk["delta_text"] for chunk in found) == last["cumulative_text"]
        ids = [chunk["delta_token_id"] for chunk in found if chunk["delta_token_id"] is not None]
        assert ids == last["cumulative_token_ids"]
        assert len(ids) == 40
        assert len([chunk for chunk in found if chunk["delta_logprob"] is not None]) == 40
        for place, chunk in enumerate(found, 1):
            assert chunk["cumulative_token_ids"] == ids[:place]
    texts = [found[-1]["cumulative_text"] for found in chunks.values()]
    assert len(set(texts)) == 6


async def test_a_caller_that_leaves_early(redis_db: str, db: Redis) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=50)), engine(redis_db) as it:
        batch: Any = {"prompt_token_ids": [[1], [2]], "sampling_params": {"max_tokens": 10_000}}
        async with contextlib.aclosing(it.generate_stream(batch)) as stream:
            assert not (await anext(stream))["is_finished"]

        async def none_open() -> bool:
            return (await Broker(db, "default").load()).open_jobs == 0

        await eventually(none_open)


async def test_a_prompt_that_cannot_be_answered(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        batch: Any = {"prompt_token_ids": [[1, 2, 3]], "sampling_params": {"max_tokens": (1 << 20) - 1}}
        with pytest.raises(JobFailed, match="at most"):
            async for _ in it.generate_stream(batch):
                pass


async def test_both_at_once(redis_db: str) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=200)), engine(redis_db) as it:
        batch: Any = {"prompt_token_ids": [[1]] * 5, "sampling_params": {"max_tokens": 30}}

        async def streamed() -> int:
            return len([chunk async for chunk in it.generate_stream(batch) if chunk["is_finished"]])

        count, output = await asyncio.gather(streamed(), it.generate(batch))
        assert count == 5
        check_output(output, [1] * 5)
