"""Aborting and pausing: what runs returns what it has, what waits returns nothing, what comes later waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.pools.commanded import hurry
from support.pools.pool import eventually, worker
from support.pools.skyrl import check_output, engine

from rolloutmq.messages import JobFailed
from rolloutmq.worker.scripted.engine import ScriptedEngine

LONG: Any = {"max_tokens": 100_000, "logprobs": 0}


def batch(count: int, **params: Any) -> Any:
    return {"prompt_token_ids": [[1]] * count, "sampling_params": LONG | params}


async def test_what_runs_returns_what_it_has_and_what_waits_nothing(redis_db: str) -> None:
    one, two = ScriptedEngine(tokens_per_s=200), ScriptedEngine(tokens_per_s=200)
    async with (
        worker(redis_db, engine=one, max_running=2, prefetch=0),
        worker(redis_db, engine=two, max_running=2, prefetch=0),
        engine(redis_db) as it,
    ):
        task = asyncio.create_task(it.generate(batch(10)))
        await eventually(lambda: len(one._running) == len(two._running) == 2)
        await eventually(lambda: all(one._sampled(name) for name in one._running))
        await it.abort_generation()
        output = await task
        check_output(output, [1] * 10)
        assert output["stop_reasons"] == ["abort"] * 10
        lengths = sorted(len(ids) for ids in output["response_ids"])
        assert lengths[:6] == [0] * 6
        assert lengths[-1] > 0
        assert output["response_logprobs"] is not None
        assert [len(values) for values in output["response_logprobs"]] == [len(ids) for ids in output["response_ids"]]
        short = await it.generate(batch(2, max_tokens=3))  # what comes later is not touched
        assert short["stop_reasons"] == ["length"] * 2


async def test_samples_of_one_prompt_that_are_done_stay(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=1000)
    async with worker(redis_db, engine=scripted, max_running=1, prefetch=0), engine(redis_db) as it:
        task = asyncio.create_task(it.generate(batch(1, n=4, max_tokens=200)))
        await eventually(lambda: scripted._running)
        scripted.tokens_per_s = 1.0  # of those that come next
        await eventually(lambda: _second(scripted))
        await it.abort_generation()
        output = await task
        check_output(output, [1] * 4)
        assert output["stop_reasons"][0] == "length"
        assert output["stop_reasons"][2:] == ["abort"] * 2
        assert output["response_ids"][3] == []


def _second(scripted: ScriptedEngine) -> bool:
    return any(name[32:36] == "0001" for name in scripted._running)


async def test_pausing_by_aborting(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        task = asyncio.create_task(it.generate(batch(3)))
        await eventually(lambda: len(scripted._running) == 3)
        await it.pause_generation()
        assert (await task)["stop_reasons"] == ["abort"] * 3
        later = asyncio.create_task(it.generate(batch(1, max_tokens=2)))
        await eventually(lambda: len(it._calls.under_way) == 1)
        assert not scripted._running
        await it.continue_generation()
        assert (await later)["stop_reasons"] == ["length"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_aborting_while_paused(redis_db: str, mode: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=scripted, max_running=2, prefetch=0), engine(redis_db) as it:
        task = asyncio.create_task(it.generate(batch(4)))
        await eventually(lambda: len(scripted._running) == 2)
        await eventually(lambda: all(scripted._sampled(name) for name in scripted._running))
        await it.pause_generation(mode)
        await it.abort_generation()
        output = await task
        check_output(output, [1] * 4)
        assert output["stop_reasons"] == ["abort"] * 4
        assert [bool(ids) for ids in output["response_ids"]].count(True) == 2
        assert scripted.ops.frozen == (mode == "in_place")
        await it.continue_generation()
        assert (await it.generate(batch(1, max_tokens=3)))["stop_reasons"] == ["length"]


async def test_what_waits_at_the_gate_is_aborted_too(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await it.pause_generation()
        waiting = asyncio.create_task(it.generate(batch(2, n=2)))
        await eventually(lambda: len(it._calls.under_way) == 1)
        await it.abort_generation()
        output = await waiting
        assert output["stop_reasons"] == ["abort"] * 4
        assert output["response_ids"] == [[]] * 4
        await it.continue_generation()


async def test_a_stream_that_is_aborted(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=200)
    async with worker(redis_db, engine=scripted, max_running=1, prefetch=0), engine(redis_db) as it:
        ends: dict[int, Any] = {}
        async for chunk in it.generate_stream(batch(3)):
            if not ends and not chunk["is_finished"]:
                await it.abort_generation()
            if chunk["is_finished"]:
                ends[chunk["index"]] = chunk
        assert [ends[index]["stop_reason"] for index in range(3)] == ["abort"] * 3
        assert sorted(len(chunk["cumulative_token_ids"]) > 0 for chunk in ends.values()) == [False, False, True]


async def test_others_are_not_aborted(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=400)
    async with worker(redis_db, engine=scripted) as running, engine(redis_db) as it, engine(redis_db) as other:
        tasks = [asyncio.create_task(one.generate(batch(2, max_tokens=10_000))) for one in (it, other)]
        await eventually(lambda: len(scripted._running) == 4)
        await it.abort_generation()
        mine = await tasks[0]
        hurry(running)
        theirs = await tasks[1]
        assert mine["stop_reasons"] == ["abort"] * 2
        assert theirs["stop_reasons"] == ["length"] * 2


async def test_an_operators_cancellation_is_no_abort(redis_db: str) -> None:
    scripted = ScriptedEngine(tokens_per_s=10)
    async with worker(redis_db, engine=scripted), engine(redis_db) as it:
        task = asyncio.create_task(it.generate(batch(1)))
        await eventually(lambda: scripted._running)
        client = await it.client()
        await client.cancel_all()
        with pytest.raises(JobFailed, match="cancelled"):
            await task


async def test_a_new_version_aborts_unless_told_otherwise(redis_db: str) -> None:
    import torch  # noqa: PLC0415

    scripted = ScriptedEngine(tokens_per_s=300)
    async with worker(redis_db, engine=scripted) as running, engine(redis_db) as it:
        for version, abort in ((1, True), (2, False)):
            task = asyncio.create_task(it.generate(batch(2, max_tokens=10_000)))
            await eventually(lambda: len(scripted._running) == 2)
            await it.update_named_weights({"names": ["w"], "tensors": [torch.full((4,), float(version))]})
            await it.update_weight_version(version, abort_all_requests=abort)
            if not abort:
                hurry(running)
            output = await task
            check_output(output, [1, 1])
            assert output["stop_reasons"] == (["abort"] if abort else ["length"]) * 2
            assert output["weight_version"] == ("0" if abort else "2")
