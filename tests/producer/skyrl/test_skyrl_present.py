"""What SkyRL's present interface wants beside that of January 2026, and what was missing of the latter."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pools.commanded import hurry
from support.pools.pool import eventually, worker
from support.pools.skyrl import Numbers, check_output, engine, joined
from support.pools.skyrl_trainer import adapter, request

from rolloutmq.messages import GenerateJob, InvalidField, LogprobOptions, RolloutResult, Segment
from rolloutmq.messages.errors import FeatureUnavailable, RedisUnavailable, RolloutMQError
from rolloutmq.producer.data import Texts
from rolloutmq.producer.skyrl import SkyRLEngine, group_outputs_by_prompt
from rolloutmq.producer.skyrl.outputs import output_of
from rolloutmq.producer.skyrl.requests import Wishes, sampling_fields
from rolloutmq.producer.skyrl.versions import VersionNames
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT: Any = {"prompt_token_ids": [[1]], "sampling_params": {"max_tokens": 3}}


class LoraLoadRequest:
    """As skyrl-train 0.3.1 makes it."""

    def __init__(self, lora_path: str) -> None:
        self.names: list[str] = []
        self.dtypes: list[str] = []
        self.shapes: list[list[int]] = []
        self.lora_path = lora_path


@dataclass
class NamedLoraLoadRequest:
    """As skyrl 0.3.0 makes it."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    lora_path: str = ""
    lora_name: str = ""


async def test_an_adapter_that_the_trainer_sends_is_sampled_with(redis_db: str, tmp_path: Path) -> None:
    async with worker(redis_db, engine=ScriptedEngine(lora=True)), engine(redis_db) as it:
        await joined(it)
        assert await it.update_named_weights(LoraLoadRequest(adapter(tmp_path))) == (True, "")
        check_output(await it.generate(PROMPT), [1], adapter="skyrl-lora@1")
        await it.update_named_weights(NamedLoraLoadRequest(lora_path=str(tmp_path), lora_name="math"))
        check_output(await it.generate(PROMPT), [1], adapter="math@1")
        check_output(await it.generate(PROMPT, model="skyrl-lora"), [1], adapter="skyrl-lora@1")
        check_output(await it.generate(PROMPT, model=it.model_name), [1])
        for body, name in (({}, "math@1"), ({"model": "skyrl-lora"}, "skyrl-lora@1"), ({"model": "m"}, "math@1")):
            answer = await it.completion({"json": {"prompt": [[1]], "max_tokens": 3, "return_token_ids": True} | body})
            request_id = answer["id"].removeprefix("cmpl-") + "-0000"
            ids = answer["choices"][0]["token_ids"]
            spans = [[{"version": "0", "number": 0, "start": 0, "end": 3}]]
            output = {"request_ids": [request_id], "response_ids": [ids], "weight_versions": spans}
            texts = {"responses": [Numbers().decode(ids)], "response_logprobs": None}
            check_output(output | texts, [1], adapter=name)  # type: ignore[arg-type]
        await it.unload_lora_adapter("math")
        check_output(await it.generate(PROMPT), [1])


@dataclass
class BroadcastInitInfo:
    """As skyrl 0.3.0 makes it: for the communicator of vLLM."""

    master_addr: str = "127.0.0.1"
    master_port: int = 5000
    rank_offset: int = 1
    world_size: int = 2


async def test_a_group_that_only_vllm_can_join_is_refused_with_the_reason(redis_db: str) -> None:
    async with engine(redis_db) as it:
        with pytest.raises(FeatureUnavailable, match="vLLM's own communicator"):
            await it.init_weight_update_communicator(BroadcastInitInfo())


@pytest.mark.parametrize("wrong", [{"lora_path": ""}, {"lora_path": 5}, {"lora_path": "a", "lora_name": 5}])
async def test_a_wrong_adapter_is_named(redis_db: str, wrong: dict[str, Any]) -> None:
    async with engine(redis_db) as it:
        with pytest.raises(InvalidField, match="lora_"):
            await it.update_named_weights(wrong)


async def test_versions_with_names(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        await it.update_named_weights(request(1))
        await it.update_weight_version("step_100")
        await it.update_weight_version("step_100")  # it is
        assert await it.get_weight_version() == "step_100"
        output = await it.generate(PROMPT)
        assert output["weight_version"] == "step_100"
        assert output["weight_versions"] == [[{"version": "step_100", "number": 1, "start": 0, "end": 3}]]
        check = await it.check_weight_sync_integrity("step_100")
        assert (check["consistent"], set(check["versions"].values())) == (True, {"step_100"})
        with pytest.raises(InvalidField, match="expected_version="):
            await it.check_weight_sync_integrity("step_99")
        await it.update_weight_version("step_200")  # the next sync
        await it.update_named_weights(request(1))
        assert (await it.generate(PROMPT))["weight_version"] == "step_200"
        with pytest.raises(InvalidField, match="new_version="):
            await it.update_weight_version("step_100")
        await it.update_named_weights(request(1))
        assert (await it.generate(PROMPT))["weight_version"] == "3"
        assert await SkyRLEngine.get_remote_weight_version(redis_db) == "3"
    with pytest.raises(RedisUnavailable):
        await SkyRLEngine.get_remote_weight_version("redis://127.0.0.1:9/0", timeout=0.5)


def test_the_newest_of_versions_with_names_is_the_one_with_the_highest_number() -> None:
    names = VersionNames()
    names.give(2, "a")
    names.give(1, "b")
    job = GenerateJob(token_ids=[1])
    jobs = [job, GenerateJob(token_ids=[1])]
    found = [
        [
            RolloutResult(
                job_id=one.id, sample=0, n=1, group_id=one.id, worker_id="w", attempt=1, token_ids=[5, 6],
                finish_reason="stop", segments=segments,
            )
        ]
        for one, segments in zip(jobs, [(Segment(1, 1), Segment(2, 1)), (Segment(1, 2),)], strict=True)
    ]  # fmt: skip
    output = output_of(jobs, found, Wishes(), Texts(Numbers()), names)
    assert output["weight_version"] == "a"
    assert [one["weight_version"] for one in group_outputs_by_prompt(output)] == ["a", "b"]


def test_the_likeliest_tokens_and_the_prompts_logprobs_are_in_the_output() -> None:
    job = GenerateJob(token_ids=[1, 2], logprobs=LogprobOptions(top=2, prompt=True))
    result = RolloutResult(
        job_id=job.id, sample=0, n=1, group_id=job.id, worker_id="w", attempt=1, token_ids=[5], finish_reason="stop",
        segments=(Segment(0, 1),), logprobs=[-0.5], arrays={"prompt_logprobs": np.array([np.nan, -2], np.float32)},
        token_arrays={"top_ids": np.array([[5, 7]], np.int32), "top_logprobs": np.array([[-0.5, -1]], np.float32)},
    )  # fmt: skip
    wishes = Wishes(logprobs=True, top_logprobs=True, prompt_logprobs=True)
    output = output_of([job], [[result]], wishes, Texts(Numbers()), VersionNames())
    assert output["top_logprobs"] == [[{5: -0.5, 7: -1.0}]]
    assert output["prompt_logprobs"] == [[None, -2.0]]
    assert output_of([job], [[None]], wishes, Texts(Numbers()), VersionNames())["top_logprobs"] == [[]]


def test_sampling_parameters_of_skyrls_sglang_engine() -> None:
    fields, logprobs = sampling_fields({"action_mask": [False, True, True], "disallowed_tokens": [2], "priority": 3})
    processors = [(one.name, one.params) for one in fields["logit_processors"]]
    assert processors == [("action_mask", {"token_ids": [1, 2]}), ("disallowed_tokens", {"token_ids": [2]})]
    assert (fields["priority"], logprobs) == ("high", False)
    assert sampling_fields({"logprobs": 1})[0]["logprobs"].top == 0
    assert sampling_fields({"logprobs": 3})[0]["logprobs"].top == 3


async def test_a_session_that_ended_prefers_no_worker(redis_db: str) -> None:
    async with worker(redis_db), engine(redis_db) as it:
        session = "an id with spaces"
        await it.generate(PROMPT | {"session_ids": [session], "cache_salt": "v1", "mm_features": [None]})
        assert len(it._generation.worker_of) == 1
        await it.finish_session(session)
        await it.finish_session("unknown")
        assert it._generation.worker_of == {}
        with pytest.raises(FeatureUnavailable, match="mm_features"):
            await it.generate(PROMPT | {"mm_features": [{"mm_hashes": {}}]})


async def test_facts_for_the_present_interface(redis_db: str) -> None:
    async with engine(redis_db) as it:
        with pytest.raises(RolloutMQError, match="no worker"):
            await it.get_world_size()
        with pytest.raises(FeatureUnavailable, match="get_endpoint_url"):
            it.get_endpoint_url()
        async with worker(redis_db), worker(redis_db):
            await joined(it, 2)
            assert await it.get_world_size() == (2, 1)
            assert it.model_name == (await (await it.client()).workers())[0].model


class Templated(Numbers):
    """Its template opens every turn with 3 and closes it with 4."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        ids = [token for turn in conversation for token in (3, *map(ord, turn["content"]), 4)]
        if options.pop("continue_final_message", False):
            assert not options["add_generation_prompt"]
            return ids[:-1]
        return [*ids, 3] if options["add_generation_prompt"] else ids


async def test_a_chat_that_is_rendered_here(redis_db: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    rendered: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [3, 97, 4, 3, 98, 4, 3]),
        (going_on, [3, 97, 4, 3, 98]),
        ({"continue_final_message": True}, [3, 97, 4, 3, 98]),
        ({"add_generation_prompt": False}, [3, 97, 4, 3, 98, 4]),
    ]
    async with worker(redis_db), engine(redis_db, tokenizer=Templated()) as it:
        for more, ids in rendered:
            answer = await it.render_chat_completion({"json": {"model": "m", "messages": turns} | more})
            assert answer == {"model": "m", "token_ids": ids, "features": None}
        for more, ids in rendered[1:]:
            body = {"messages": turns, "max_tokens": 2, "return_token_ids": True, "logprobs": True} | more
            answer = await it.chat_completion({"json": body})
            assert answer["prompt_token_ids"] == ids
            (choice,) = answer["choices"]
            assert choice["message"]["content"] == Numbers().decode(choice["token_ids"])
        both = {"messages": turns, "continue_final_message": True, "add_generation_prompt": True}
        for answer in (await it.chat_completion({"json": both}), await it.render_chat_completion({"json": both})):
            assert (answer["error"]["code"], answer["error"]["param"]) == (400, "add_generation_prompt")


async def test_sleep_waits_for_requests_that_end(redis_db: str) -> None:
    endless = PROMPT | {"sampling_params": {"max_tokens": 100_000}}
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0)) as running, engine(redis_db) as it:
        await joined(it)
        for options, reason in (({"abort_first": False, "drain_timeout": 60.0}, "length"), ({}, "abort")):
            task = asyncio.create_task(it.generate(endless))
            await eventually(lambda: running.engine._running)
            await it.sleep(tags=["kv_cache"], timeout=10.0, abort_first=False, drain_timeout=0.01)
            assert it._calls.under_way  # it goes on after wake_up
            await it.wake_up(tags="kv_cache", timeout=10.0)
            await eventually(lambda: running.engine._running)
            if reason == "length":
                asyncio.get_running_loop().call_later(0.2, hurry, running)
            await it.sleep(tags=["kv_cache"], **options)
            assert not it._calls.under_way
            assert (await task)["stop_reasons"] == [reason]
            await it.wake_up()
            running.engine.tokens_per_s = 200.0


async def test_a_pause_keeps_requests_where_the_engine_is_made_so(redis_db: str) -> None:
    async with (
        worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0)) as running,
        engine(redis_db, pause_mode="keep") as it,
    ):
        await joined(it)
        task = asyncio.create_task(it.generate(PROMPT | {"sampling_params": {"max_tokens": 20_000}}))
        await eventually(lambda: running.engine._running)
        await it.pause_generation()
        assert running.engine.ops.frozen
        await it.resume_generation()
        hurry(running)
        output = await task
        assert output["stop_reasons"] == ["length"]
        check_output(output, [1])
    with pytest.raises(InvalidField, match="mode="):
        SkyRLEngine(redis_db, pause_mode="wait")


@pytest.mark.parametrize("mode", [None, "retract", "in_place"])
async def test_caches_of_running_requests(redis_db: str, mode: str | None) -> None:
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=200.0)) as running, engine(redis_db) as it:
        await joined(it)
        task = asyncio.create_task(it.generate(PROMPT | {"sampling_params": {"max_tokens": 20_000}}))
        await eventually(lambda: running.engine._running)
        if mode is not None:
            await it.pause_generation(mode)
        await it.reset_prefix_cache(reset_running_requests=True)
        assert running.engine.ops.flushes >= 1
        assert it._control.halted == (mode or "")
        if mode is not None:
            assert not task.done()
            await it.resume_generation()
        hurry(running)
        output = await task
        assert output["stop_reasons"] == ["length"]
        check_output(output, [1])
