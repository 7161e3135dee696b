"""vLLM's door over real HTTP, with scripted workers: token ids in and out, control, metrics, weights."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from support.gateways import gateway
from support.keys import bearer, keys_file
from support.pools.pool import Running, eventually, runs, worker
from support.pools.skyrl_trainer import adapter, weights

from rolloutmq import RolloutClient
from rolloutmq.worker.scripted.engine import ScriptedEngine

ASKED: dict[str, Any] = {
    "model": "scripted", "token_ids": [1, 2, 3], "cache_salt": "7", "priority": 0,
    "sampling_params": {
        "max_tokens": 4, "temperature": 1.0, "logprobs": 1, "stop_token_ids": [9], "skip_special_tokens": False,
    },
}  # fmt: skip
Served = tuple[httpx.AsyncClient, Running]


@contextlib.asynccontextmanager
async def serving(url: str, *, tokens_per_s: float | None = None, **settings: Any) -> AsyncIterator[Served]:
    engine = ScriptedEngine(tokens_per_s=tokens_per_s, lora=True)
    async with worker(url, engine=engine, max_running=8) as running, gateway(url, **settings) as client:
        yield client, running


async def done(client: httpx.AsyncClient, path: str, body: Any = None, **more: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body, **more)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    found: dict[str, Any] = answer.json()
    return found


async def test_tokens_have_texts_numbers_and_evidence(redis_db: str) -> None:
    """verifiers and TRL read `token`, newer clients of vLLM `token_id`."""
    async with serving(redis_db) as (client, _):
        body = ASKED | {"request_id": "trl-1", "no_such_field": 1}
        found = await done(client, "/inference/v1/generate", body)
        (choice,) = found["choices"]
        content = choice["logprobs"]["content"]
        assert [it["token"] for it in content] == [f"token_id:{it}" for it in choice["token_ids"]]
        assert [it["token_id"] for it in content] == choice["token_ids"]
        assert all(math.isfinite(it["logprob"]) and it["logprob"] != -9999.0 for it in content)
        assert all(it["top_logprobs"][0]["token"] == it["token"] for it in content)
        assert (choice["finish_reason"], choice["index"]) == ("length", 0)
        assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": 4}]
        assert (found["request_id"], found["model"], found["output_mode"]) == ("trl-1", "scripted", "tokens")
        assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (3, 4)
        assert found["prompt_token_ids"] is None
        assert await done(client, "/inference/v1/generate", body) == found
        asked = ASKED | {"return_token_ids": True, "sampling_params": {"n": 2, "max_tokens": 2}}
        more = await done(client, "/skyrl/v1/generate", asked)
        assert more["prompt_token_ids"] == [1, 2, 3]
        assert [(it["logprobs"], it["routed_experts"], len(it["token_ids"])) for it in more["choices"]] == [
            (None, None, 2)
        ] * 2
        headers = {"X-Session-ID": "trace-1"}
        await done(client, "/inference/v1/generate", ASKED, headers=headers)
        async with RolloutClient(redis_db) as trainer:
            assert len((await trainer.take_session("trace-1")).turns) == 1


async def test_streams_have_each_token_once(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=50.0) as (client, _):
        text = (await client.post("/inference/v1/generate", json=ASKED | {"stream": True})).text
    *chunks, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    choices = [it for chunk in chunks for it in json.loads(chunk)["choices"]]
    ids = [token for it in choices for token in it["token_ids"]]
    assert len(ids) == 4
    assert [one["token_id"] for it in choices for one in (it["logprobs"] or {"content": []})["content"]] == ids
    assert choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"token_ids": None}, "input_ids"),
        ({"token_ids": "abc"}, "input_ids"),
        ({"token_ids": [-1]}, "input_ids"),
        ({"token_ids": [True]}, "input_ids"),
        ({"sampling_params": [1]}, "sampling_params"),
        ({"sampling_params": {"logprobs": "all"}}, "logprobs"),
        ({"sampling_params": {"logprobs": 1000}}, "top_logprobs"),
        ({"sampling_params": {"max_tokens": -1}}, "max_tokens"),
        ({"sampling_params": {"n": 1 << 40}}, "n"),
        ({"features": {"mm_hashes": {}, "x": 1}}, "features"),
        ({"output_mode": "text"}, "output_mode"),
        ({"model": 7}, "model"),
        ({"request_id": "x" * 1000}, "request_id"),
    ],
)
async def test_bad_bodies_name_what_is_wrong(redis_db: str, more: dict[str, Any], param: str) -> None:
    async with gateway(redis_db) as client:
        answer = await client.post("/inference/v1/generate", json=ASKED | {"model": None} | more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_pause_keep_update_resume(redis_db: str, tmp_path: Path) -> None:
    """prime-rl's update: nothing that runs ends, and its tokens say which weights sampled them."""
    folder = tmp_path / "step_1"
    folder.mkdir()
    save_file(weights(1), folder / "model.safetensors")
    (folder / "NCCL_READY").touch()
    async with serving(redis_db, tokens_per_s=60.0, weights_from=tmp_path) as (client, running):
        long = ASKED | {"sampling_params": {"max_tokens": 240, "logprobs": 1}}
        runs_on = asyncio.create_task(done(client, "/inference/v1/generate", long))
        await eventually(lambda: running.sampled and running.sampled[0] > 3)
        assert await done(client, "/pause?mode=keep&clear_cache=false") == {"status": "paused"}
        waits = asyncio.create_task(done(client, "/inference/v1/generate", ASKED))
        found = await done(client, "/update_weights", {"weight_dir": str(folder)})
        assert found["weight_version"] == "1"
        assert (await client.get("/weight_info")).json() == {"weight_version": "1"}
        assert not waits.done()
        assert await done(client, "/resume") == {"status": "resumed"}
        assert (await waits)["choices"][0]["weight_versions"][0]["version"] == 1
        versions = (await runs_on)["choices"][0]["weight_versions"]
        assert [it["version"] for it in versions] == [0, 1]
        checked = await done(client, "/weight_checker", {"action": "checksum"})
        assert (checked["success"], checked["weight_version"]) == (True, "1")
        assert checked["checksum"]
        assert (await done(client, "/weights_checker", {"action": "compare"}))["checksum"] == checked["checksum"]
        for body, status in (({"weight_dir": None}, 400), ({}, 400), ({"weight_dir": "/etc"}, 403)):
            assert (await client.post("/update_weights", json=body)).status_code == status


async def test_pause_wait_returns_when_nothing_runs(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=40.0) as (client, running):
        asked = asyncio.create_task(
            done(client, "/inference/v1/generate", ASKED | {"sampling_params": {"max_tokens": 20}})
        )
        await eventually(lambda: runs(running.engine, 1))
        await done(client, "/pause?mode=wait")
        assert running.generation.running == 0
        assert len((await asked)["choices"][0]["token_ids"]) == 20


async def test_abort_requests_by_name_and_all(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=20.0) as (client, running):
        long = ASKED | {"sampling_params": {"max_tokens": 4000, "logprobs": 0}}
        asked = [
            asyncio.create_task(done(client, "/inference/v1/generate", long | {"request_id": name}))
            for name in ("a", "b")
        ]
        await eventually(lambda: len(running.sampled) == 2 and min(running.sampled) > 1)
        assert (await done(client, "/inference/v1/abort_requests", {"request_ids": ["a"]}))["aborted"] == 1
        (choice,) = (await asked[0])["choices"]
        assert choice["finish_reason"] == "abort"
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
        assert (await done(client, "/abort_requests", {}))["aborted"] == 1
        assert (await asked[1])["choices"][0]["finish_reason"] == "abort"
        for ids in ("a", [1], ["a"] * 20_000, {"a": 1}):
            assert (await client.post("/abort_requests", json={"request_ids": ids})).status_code == 400


def families(text: str) -> dict[str, float]:
    """Name of a sample -> its value."""
    return {it.name: it.value for family in text_string_to_metric_families(text) for it in family.samples}


async def test_metrics_are_of_one_engine_with_the_tenants_queue(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": "", "b": ""})
    a, b = (bearer(keys[name]) for name in "ab")
    async with serving(redis_db, tokens_per_s=20.0, keys=file) as (client, running):
        body = ASKED | {"sampling_params": {"max_tokens": 4000}}
        room = running.status.max_running
        asked = [
            asyncio.create_task(client.post("/inference/v1/generate", json=body, headers=a)) for _ in range(3 * room)
        ]

        async def queued() -> bool:
            found = families((await client.get("/metrics", headers=a)).text)
            waiting = found["vllm:num_requests_waiting"]
            assert waiting == found["vllm:num_requests_waiting_by_reason"]
            return bool(waiting > 0 and found["vllm:num_requests_running"] >= room)

        await eventually(queued)
        others = families((await client.get("/metrics", headers=b)).text)
        assert (others["vllm:num_requests_waiting"], others["vllm:num_requests_running"]) == (0, 0)
        assert 0 <= others["vllm:kv_cache_usage_perc"] <= 1
        assert others["vllm:num_preemptions_total"] == 0
        assert others["vllm:cache_config_info"] == 1
        assert (await client.get("/metrics")).status_code == 401
        await done(client, "/abort_requests", {}, headers=a)
        await asyncio.gather(*asked)


async def test_adapters_and_what_is_asked_before(redis_db: str, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    path = adapter(tmp_path / "lora")
    async with serving(redis_db, weights_from=tmp_path) as (client, _):
        assert (await client.request("GET", "/get_world_size", json={})).json() == {"world_size": 1}
        config = (await client.get("/server_info?config_format=json")).json()["vllm_config"]
        assert config["weight_transfer_config"] is not None
        assert config["model_config"]["dtype"].startswith("torch.")
        assert {"max_lora_rank", "max_loras"} <= config["lora_config"].keys()
        for route in ("/load_lora_adapter", "/v1/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
            said = await done(client, route, {"lora_name": "policy-v1", "lora_path": path, "load_inplace": False})
            assert (said["status"], said["lora_name"], said["lora_int_id"]) == ("success", "policy-v1", 1)
        found = await done(client, "/inference/v1/generate", ASKED | {"model": "policy-v1"})
        assert found["model"] == "policy-v1"
        assert (await done(client, "/v1/unload_lora_adapter", {"lora_name": "policy-v1"}))["success"]
        for body in (None, {"reset_running_requests": True}):
            flushed = await done(client, "/reset_prefix_cache", body)
            assert (flushed["success"], flushed["flushed"]) == (True, True)
        for body, status in (({}, 400), ({"lora_name": 7, "lora_path": path}, 400), ({"lora_name": "x"}, 400)):
            assert (await client.post("/load_lora_adapter", json=body)).status_code == status
        absent = {"lora_name": "x", "lora_path": str(tmp_path / "nowhere")}
        assert (await client.post("/load_lora_adapter", json=absent)).status_code == 404
