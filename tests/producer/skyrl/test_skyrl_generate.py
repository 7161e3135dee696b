"""generate over a pool of several workers: order, samples, log-probabilities, versions, sessions, failures."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from support.pools.pool import Running, eventually, worker
from support.pools.skyrl import Numbers, check_output, engine, joined

from rolloutmq.messages import Broker, GenerateJob, InvalidField, JobFailed, RolloutResult, Segment, WaitTimeout
from rolloutmq.messages.errors import ConfigError, FeatureUnavailable, RolloutMQError
from rolloutmq.producer.data import Texts
from rolloutmq.producer.skyrl import SkyRLEngine
from rolloutmq.producer.skyrl.outputs import output_of
from rolloutmq.producer.skyrl.requests import Wishes, read_batch
from rolloutmq.producer.skyrl.versions import VersionNames
from rolloutmq.worker.engine.protocol import EngineInfo, EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine

SHORT = {"max_generate_length": 5}


class Wide(ScriptedEngine):
    """Has hidden states and routed experts: of token t, (t, 1) and experts [[t, 1]]."""

    @property
    def info(self) -> EngineInfo:
        plain = super().info
        return EngineInfo(
            **{name: getattr(plain, name) for name in plain.__slots__ if name != "features"},
            features=plain.features | {"hidden_states", "routed_experts"},
        )

    async def generate(self, request: EngineRequest) -> EngineOutput:
        output = await super().generate(request)
        ids = output.token_ids
        arrays = {
            "hidden_states": np.stack([ids, np.ones_like(ids)], 1).astype(np.float32),
            "routed_experts": np.stack([ids, np.ones_like(ids)], 1).reshape(-1, 1, 2).astype(np.int32),
        }
        return EngineOutput(ids, output.logprobs, output.finish_reason, token_arrays=arrays)


async def test_prompts_over_many_workers_in_order(redis_db: str) -> None:
    async with AsyncExitStack() as stack:
        pool = [await stack.enter_async_context(worker(redis_db, max_running=2, prefetch=0)) for _ in range(3)]
        it = await stack.enter_async_context(engine(redis_db, sampling_params=SHORT))
        await joined(it, 3)
        prompts = [[7] * (1 + i % 9) for i in range(300)]
        output = await it.generate({"prompt_token_ids": prompts})
        check_output(output, [len(prompt) for prompt in prompts])
        assert [len(ids) for ids in output["response_ids"]] == [5] * 300
        assert set(output["stop_reasons"]) == {"length"}
        assert (output["weight_version"], output["n_per_prompt"], output["response_logprobs"]) == ("0", None, None)
        assert (output["hidden_states"], output["routed_experts"]) == (None, None)
        assert all(running.worker._status().finished_samples for running in pool)  # each did some of it


async def test_samples_are_flattened_by_prompt_and_have_logprobs_if_asked(redis_db: str) -> None:
    async with worker(redis_db, max_running=32), engine(redis_db) as it:
        for params in ({"n": 3, "logprobs": 0}, {"n": 3, "logprobs": 1}, {"n": 3, "return_logprob": True}):
            output = await it.generate({"prompt_token_ids": [[1], [2, 3]], "sampling_params": params | SHORT})
            assert (len(output["response_ids"]), output["n_per_prompt"]) == (6, 3)
            assert output["response_logprobs"] is not None
            check_output(output, [1, 1, 1, 2, 2, 2])
            assert output["request_ids"] is not None
            jobs = [request[:32] for request in output["request_ids"]]
            assert (len(set(jobs)), jobs[0], jobs[3]) == (2, jobs[2], jobs[5])


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 3, "min_tokens": 0, "temperature": 1.0, "top_k": -1, "skip_special_tokens": True},
        {"max_new_tokens": 3, "no_stop_trim": True},
        {"max_generate_length": 3, "additional_kwargs": None, "stop": None},
        {"response_length": 3, "do_sample": True},
    ],
)
async def test_dialects(redis_db: str, params: dict[str, Any]) -> None:
    async with worker(redis_db), engine(redis_db, sampling_params={"max_tokens": 9}) as it:
        output = await it.generate({"prompt_token_ids": [[1]], "sampling_params": params})
        assert [len(ids) for ids in output["response_ids"]] == [3]
        own = await it.generate({"prompt_token_ids": [[1]]})
        assert [len(ids) for ids in own["response_ids"]] == [9]


async def test_conversations_are_rendered_with_the_trainers_tokenizer(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        said = [{"role": "user", "content": "abc"}]
        output = await it.generate({"prompts": [said], "sampling_params": SHORT})
        check_output(output, [len(Numbers().apply_chat_template(said, add_generation_prompt=True, tokenize=True))])


async def test_hidden_states_and_routed_experts(redis_db: str) -> None:
    async with worker(redis_db, engine=Wide()), engine(redis_db, sampling_params=SHORT) as it:
        output = await it.generate(
            {"prompt_token_ids": [[1]], "return_hidden_states": True, "return_routed_experts": True}
        )
        (ids,) = output["response_ids"]
        assert output["hidden_states"] is not None
        assert output["routed_experts"] is not None
        assert output["hidden_states"][0].tolist() == [[token, 1.0] for token in ids]
        assert output["routed_experts"][0].dtype == np.int32
        assert output["routed_experts"][0].tolist() == [number for token in ids for number in (token, 1)]


PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def test_media_beside_prompts() -> None:
    said = {"role": "user", "content": "what is it?"}
    shown = {
        "role": "user",
        "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}],
    }
    batch = {"prompts": [[said], [shown], [said]], "image_data": [[PNG, PNG], PNG, None]}
    first, second, third = read_batch(batch, {}, Texts(Numbers())).jobs
    assert [len(job.media) for job in (first, second, third)] == [2, 1, 0]
    assert first.messages is not None
    assert second.messages is not None
    assert first.messages[0].media == ("image", "image")
    assert isinstance(second.messages[0].content, tuple)
    assert [part.type for part in second.messages[0].content] == ["text", "image", "text"]
    assert third.token_ids is not None  # without any the trainer's tokenizer renders it
    (job,) = read_batch({"prompt_token_ids": [[1, 2]], "image_data": [PNG]}, {}, Texts(Numbers())).jobs
    assert job.token_ids is not None
    assert (job.token_ids.tolist(), len(job.media)) == ([1, 2], 1)
    for wrong in ([b"no image"], [[PNG, b""]], [PNG, PNG]):
        with pytest.raises(InvalidField, match="image"):
            read_batch({"prompts": [[said]], "image_data": wrong}, {}, Texts(Numbers()))
    with pytest.raises(InvalidField, match="places for as many"):
        read_batch({"prompts": [[shown]], "image_data": [[]]}, {}, Texts(Numbers()))


async def test_what_no_worker_can_do_is_an_error_with_its_name(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db, sampling_params=SHORT) as it:
        await joined(it)
        for key in ("return_hidden_states", "return_routed_experts"):
            with pytest.raises(FeatureUnavailable, match=key.removeprefix("return_")):
                await it.generate({"prompt_token_ids": [[1]], key: True})  # type: ignore[misc]


async def test_prompts_of_a_session_go_to_one_worker(redis_db: str) -> None:
    async with worker(redis_db, max_running=4), worker(redis_db, max_running=4), engine(redis_db) as it:
        sessions: list[Any] = [("task", i % 4) for i in range(16)]
        for _ in range(6):
            await it.generate({"prompt_token_ids": [[1]] * 16, "session_ids": sessions, "sampling_params": SHORT})
        before = dict(it._generation.worker_of)
        assert len(before) == 4
        for _ in range(6):
            await it.generate({"prompt_token_ids": [[1]] * 4, "session_ids": sessions[:4], "sampling_params": SHORT})
            assert it._generation.worker_of == before


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        ({}, "prompts"),
        ({"prompts": [[{"role": "user", "content": "a"}]], "prompt_token_ids": [[1]]}, "prompts"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [[1], []]}, "prompt_token_ids[1]"),
        ({"prompt_token_ids": [[1], [2, -3]]}, "prompt_token_ids[1].token_ids"),
        ({"prompt_token_ids": [[1]], "session_ids": ["a", "b"]}, "session_ids"),
        ({"prompt_token_ids": [[1]], "trajectory_ids": ["a"]}, "trajectory_ids"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"prompt_token_ids": [[1]], "sampling_params": {"top_p": 3}}, "top_p"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_is_submitted(
    redis_db: str, db: Redis, batch: Any, field: str
) -> None:
    async with engine(redis_db) as it:
        with pytest.raises(InvalidField) as caught:
            await it.generate(batch)
        assert caught.value.field == field
        assert (await Broker(db, "default").load()).open_jobs == 0


async def test_a_prompt_that_cannot_be_answered_is_an_error_and_the_others_are_cancelled(
    redis_db: str, db: Redis
) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=5)), engine(redis_db) as it:
        endless = {"max_tokens": (1 << 20) - 2}
        with pytest.raises(JobFailed, match="at most"):
            await it.generate({"prompt_token_ids": [[1, 2, 3], [1]], "sampling_params": endless})
        await eventually(lambda: _open(db, 0))
        assert (await it.client()).outstanding == 0


async def _open(db: Redis, count: int) -> bool:
    return (await Broker(db, "default").load()).open_jobs == count


async def test_nobody_answers_in_time(redis_db: str, db: Redis) -> None:
    async with engine(redis_db, timeout_s=0.2) as it:
        with pytest.raises(WaitTimeout):
            await it.generate({"prompt_token_ids": [[1], [2]]})
        assert await _open(db, 0)


async def test_a_call_that_is_cancelled_leaves_nothing_in_the_pool(redis_db: str, db: Redis) -> None:
    async with engine(redis_db) as it:
        task = asyncio.create_task(it.generate({"prompt_token_ids": [[1], [2]]}))
        await eventually(lambda: _open(db, 2))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert await _open(db, 0)


async def test_a_worker_that_is_lost_costs_nothing(redis_db: str) -> None:
    async with AsyncExitStack() as stack:
        doomed: Running = await stack.enter_async_context(
            worker(redis_db, engine=ScriptedEngine(tokens_per_s=100), checkpoint_s=0.1)
        )
        it = await stack.enter_async_context(engine(redis_db, sampling_params={"max_tokens": 60}))
        task = asyncio.create_task(it.generate({"prompt_token_ids": [[1]] * 8}))
        await eventually(lambda: doomed.engine._running)
        await stack.enter_async_context(worker(redis_db))
        await doomed.die()
        output = await task
        check_output(output, [1] * 8)


def test_versions_of_samples_that_crossed_an_update() -> None:
    job = GenerateJob(token_ids=[1], n=3)
    common: dict[str, Any] = {"job_id": job.id, "n": 3, "group_id": job.id, "worker_id": "w", "attempt": 1}
    crossed = RolloutResult(
        sample=0, token_ids=[4, 0, 6], finish_reason="stop", segments=(Segment(3, 1), Segment(12, 2)), **common
    )
    old = RolloutResult(sample=1, token_ids=[5], finish_reason="abort", segments=(Segment(3, 1),), **common)
    output = output_of([job], [[crossed, old, None]], Wishes(logprobs=True), Texts(Numbers()), VersionNames())
    assert output["weight_version"] == "12"
    assert output["weight_versions"] == [
        [{"version": "3", "number": 3, "start": 0, "end": 1}, {"version": "12", "number": 12, "start": 1, "end": 3}],
        [{"version": "3", "number": 3, "start": 0, "end": 1}],
        [],
    ]
    assert output["stop_reasons"] == ["stop", "abort", "abort"]
    assert output["responses"] == ["4 6", "5", ""]


def test_an_engine_goes_along_with_its_caller_from_one_loop_to_the_next(redis_db: str) -> None:
    it = SkyRLEngine(redis_db, tokenizer=Numbers(), timeout_s=20.0)

    async def once() -> Any:
        async with worker(redis_db):
            return await it.generate({"prompt_token_ids": [[1]], "sampling_params": SHORT})

    for _ in range(2):  # as trainers do that call asyncio.run for every step
        assert len(asyncio.run(once())["response_ids"]) == 1
    asyncio.run(it.teardown())


async def test_an_engine_that_was_torn_down(redis_db: str) -> None:
    async with engine(redis_db) as it:
        await it.client()
        await it.teardown()
        await it.teardown()
        with pytest.raises(RolloutMQError, match="torn down"):
            await it.generate({"prompt_token_ids": [[1]]})


async def test_calls_under_way_end_with_the_engine(redis_db: str, db: Redis) -> None:
    scripted = ScriptedEngine(tokens_per_s=5)
    async with worker(redis_db, engine=scripted), engine(redis_db, sampling_params={"max_tokens": 1000}) as it:
        task = asyncio.create_task(it.generate({"prompt_token_ids": [[1], [2]]}))
        streamed = asyncio.create_task(anext(it.generate_stream({"prompt_token_ids": [[1]]})))
        await eventually(lambda: len(scripted._running) == 3)
        await it.teardown()
        for ended in (task, streamed):
            with pytest.raises(RolloutMQError):
                async with asyncio.timeout(5):
                    await ended
        await eventually(lambda: _open(db, 0))


async def test_without_a_tokenizer(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # it cannot be imported
    async with worker(redis_db), engine(redis_db, tokenizer=None) as it:
        await joined(it)
        with pytest.raises(ConfigError, match="'scripted'"):
            await it.generate({"prompt_token_ids": [[1]]})
