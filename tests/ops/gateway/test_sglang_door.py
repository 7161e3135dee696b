"""SGLang's door over real HTTP, with scripted workers: bodies, answers, streams, and what a tenant may do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import save_file
from support.gateways import gateway
from support.keys import bearer, keys_file
from support.pools.pool import Running, eventually, runs, worker
from support.pools.skyrl_trainer import adapter, weights

from rolloutmq.producer.control import PoolControl
from rolloutmq.sync.disk import SnapshotStore
from rolloutmq.worker.scripted.engine import ScriptedEngine

ASKED: dict[str, Any] = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 1.0}}
Served = tuple[httpx.AsyncClient, Running]


@contextlib.asynccontextmanager
async def serving(
    url: str, *, tokens_per_s: float | None = None, pool: str = "default", **settings: Any
) -> AsyncIterator[Served]:
    """A gateway, and a worker in a pool."""
    engine = ScriptedEngine(tokens_per_s=tokens_per_s, lora=True)
    async with worker(url, engine=engine, pool=pool) as running, gateway(url, **settings) as client:
        yield client, running


async def generated(client: httpx.AsyncClient, body: dict[str, Any], **more: Any) -> Any:
    answer = await client.post("/generate", json=body, **more)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content)
    return answer.json()


async def done(client: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """The answer of a control route: JSON with its length, never empty, as SkyRL's client needs it."""
    answer = await client.post(path, json=body or {}, **more)
    assert answer.status_code == 200, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    found: dict[str, Any] = answer.json()
    return found


def refused(answer: httpx.Response, status: int, said: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert said in answer.text


def checkpoint(folder: Path, seed: int) -> str:
    folder.mkdir(parents=True)
    save_file(weights(seed), folder / "model.safetensors")
    return str(folder)


# --- /generate -------------------------------------------------------------------------------------------------------


async def test_an_answer_is_sglangs(redis_db: str) -> None:
    async with serving(redis_db) as (client, _):
        body = ASKED | {"return_logprob": True, "rid": "r-1", "no_such_field": {"a": 1}}
        found = await generated(client, body)
        info = found["meta_info"]
        assert len(found["output_ids"]) == 4
        assert [it[1] for it in info["output_token_logprobs"]] == found["output_ids"]
        assert all(isinstance(it[0], float) and it[2] is None for it in info["output_token_logprobs"])
        assert info["finish_reason"] == {"type": "length", "length": 4}
        assert (info["id"], info["prompt_tokens"], info["completion_tokens"]) == ("r-1", 3, 4)
        assert (info["weight_version"], info["weight_version_start"], info["weight_version_end"]) == ("0", 0, 0)
        assert info["weight_versions"] == [{"version": 0, "start": 0, "end": 4}]
        assert isinstance(found["text"], str)
        assert await generated(client, body) == found, "the same rid is the same request"
        assert "output_token_logprobs" not in (await generated(client, ASKED))["meta_info"]


async def test_samples_and_batches_are_lists(redis_db: str) -> None:
    async with serving(redis_db) as (client, _):
        several = await generated(client, ASKED | {"sampling_params": {"n": 2, "max_new_tokens": 3}})
        assert [len(it["output_ids"]) for it in several] == [3, 3]
        batch = {
            "input_ids": [[1], [2, 3]],
            "sampling_params": [{"max_new_tokens": 2}] * 2,
            "return_logprob": [True] * 2,
        }
        found = await generated(client, batch | {"rid": ["a", "b"]})
        assert [it["meta_info"]["prompt_tokens"] for it in found] == [1, 2]
        assert len(await generated(client, ASKED | {"input_ids": [[5]]})) == 1


async def test_a_prompt_is_scored_without_a_token(redis_db: str) -> None:
    async with serving(redis_db) as (client, _):
        body = {"input_ids": [[1, 2, 3], [4, 5, 6]], "return_logprob": True}
        found = await generated(client, body | {"sampling_params": {"max_new_tokens": 0, "temperature": 0}})
        assert [(it["text"], it["output_ids"]) for it in found] == [("", [])] * 2
        for info in (it["meta_info"] for it in found):
            assert info["finish_reason"] == {"type": "length", "length": 0}
            assert (info["completion_tokens"], info["output_token_logprobs"]) == (0, [])
        for wrong in (False, -1, "0"):
            answer = await client.post("/generate", json=body | {"sampling_params": {"max_new_tokens": wrong}})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_new_tokens")


async def test_streams_say_all_that_there_is(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=50.0) as (client, _):
        text = (await client.post("/generate", json=ASKED | {"stream": True, "return_logprob": True})).text
    *chunks, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert end == "[DONE]"
    found = [json.loads(it) for it in chunks]
    lengths = [len(it["output_ids"]) for it in found]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 4
    for shorter, longer in pairwise(found):
        assert longer["output_ids"][: len(shorter["output_ids"])] == shorter["output_ids"]
    for one in found:
        assert [it[1] for it in one["meta_info"]["output_token_logprobs"]] == one["output_ids"]
    assert found[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"text": "both"}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1.5]}, "prompt"),
        ({"input_ids": []}, "prompt"),
        ({"input_ids": [[]]}, "prompt"),
        ({"input_ids": {"a": 1}}, "input_ids"),
        ({"sampling_params": 7}, "sampling_params"),
        ({"sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}]}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": "many"}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 1 << 40}}, "max_new_tokens"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"top_logprobs_num": "3", "return_logprob": True}, "top_logprobs_num"),
        ({"image_data": ["x"]}, "image_data"),
        ({"rid": 7}, "request_id"),
        ({"session_id": ["a"]}, "session_id"),
        ({"stream": "yes"}, "stream"),
    ],
)
async def test_bad_bodies_name_what_is_wrong(redis_db: str, more: dict[str, Any], param: str) -> None:
    async with gateway(redis_db) as client:
        answer = await client.post("/generate", json=ASKED | more)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_deep_and_strange_json_is_refused(redis_db: str) -> None:
    deep = b"[" * 5000 + b"]" * 5000
    async with gateway(redis_db) as client:
        for body in (b"[1]", b"7", b"{", deep, b'{"sampling_params":' + deep + b"}", b'{"a":1,', b"\xff"):
            for path in ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk"):
                answer = await client.post(path, content=body)
                assert answer.status_code == 400, (path, body[:20], answer.text)


# --- control ---------------------------------------------------------------------------------------------------------


async def test_abort_ends_a_request_with_what_it_has(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=20.0) as (client, running), gateway(redis_db) as other:
        long = ASKED | {"sampling_params": {"max_new_tokens": 4000}, "return_logprob": True}
        asked = asyncio.create_task(generated(client, long | {"rid": "mine"}))
        goes_on = asyncio.create_task(generated(client, long | {"rid": "stays"}))
        await eventually(lambda: len(running.sampled) == 2 and min(running.sampled) > 3)
        assert (await done(other, "/abort_request", {"rid": "unknown"}))["aborted"] == 0
        assert (await done(other, "/abort_request", {"rid": "mine"}))["aborted"] == 1
        info = (await asked)["meta_info"]
        assert info["finish_reason"]["type"] == "abort"
        assert len(info["output_token_logprobs"]) == info["completion_tokens"] >= 3
        loads = (await client.get("/v1/loads?include=core")).json()["loads"]
        assert [(it["num_running_reqs"], it["num_waiting_reqs"]) for it in loads] == [(1, 0)]
        assert (await done(other, "/abort_request", {"abort_all": True}))["aborted"] == 1
        assert (await goes_on)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.get("/v1/loads")).json()["loads"][0]["num_total_reqs"] == 0


async def test_what_never_began_is_an_abort_too(redis_db: str) -> None:
    async with gateway(redis_db) as client:
        asked = asyncio.create_task(generated(client, ASKED))

        async def waits() -> bool:
            return bool((await client.get("/v1/loads")).json()["loads"][0]["num_waiting_reqs"] == 1)

        await eventually(waits)
        await done(client, "/abort_request", {"abort_all": True})
        found = await asked
        assert found["output_ids"] == []
        assert found["meta_info"]["finish_reason"]["message"].startswith("Abort before prefill")


async def test_a_pause_holds_new_requests_at_every_gateway(redis_db: str) -> None:
    async with serving(redis_db, tokens_per_s=100.0) as (client, running), gateway(redis_db) as other:
        long = asyncio.create_task(generated(client, ASKED | {"sampling_params": {"max_new_tokens": 4000}}))
        await eventually(lambda: runs(running.engine, 1))
        assert (await done(other, "/pause_generation"))["status"] == "ok"
        assert (await long)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.create_task(generated(other, ASKED))
        with pytest.raises(httpx.ReadTimeout):
            await other.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}, timeout=1.5)
        assert not waiting.done()
        await done(client, "/continue_generation")
        assert len((await waiting)["output_ids"]) == 4
        assert (await other.get("/is_paused")).json() == {"is_paused": False}
        in_place = asyncio.create_task(generated(client, ASKED | {"sampling_params": {"max_new_tokens": 50}}))
        await eventually(lambda: runs(running.engine, 1))
        await done(client, "/pause_generation", {"mode": "in_place"})
        assert (await in_place)["meta_info"]["completion_tokens"] == 50, "what runs goes on"
        await done(client, "/continue_generation")
        refused(await client.post("/pause_generation", json={"mode": "for ever"}), 400, "in_place")


async def test_what_one_tenant_does_the_other_does_not_see(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": "", "b": ""})
    a, b = (bearer(keys[name]) for name in "ab")
    async with serving(redis_db, tokens_per_s=50.0, keys=file) as (client, running):
        mine = asyncio.create_task(
            generated(client, ASKED | {"rid": "same", "sampling_params": {"max_new_tokens": 60}}, headers=a)
        )
        await eventually(lambda: runs(running.engine, 1))
        assert (await done(client, "/abort_request", {"rid": "same"}, headers=b))["aborted"] == 0
        assert (await done(client, "/abort_request", {"abort_all": True}, headers=b))["aborted"] == 0
        await done(client, "/pause_generation", headers=b)
        for path in ("/flush_cache", "/reset_prefix_cache"):  # no 403: trainers that flush at each update end there
            said = await done(client, path, headers=b)
            assert (said["success"], said["flushed"]) == (True, False)
            assert "others share this pool" in said["message"]
        assert (await client.get("/v1/loads", headers=b)).json()["loads"][0]["num_total_reqs"] == 0
        for path in ("/update_weights_from_disk", "/pull_weights", "/begin_weight_update", "/end_weight_update"):
            answer = await client.post(path, json={"model_path": "/x", "target_version": 1}, headers=b)
            refused(answer, 403, "share it with you")
        assert (await mine)["meta_info"]["completion_tokens"] == 60
        assert len((await generated(client, ASKED, headers=a))["output_ids"]) == 4
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 401


async def test_what_trainers_ask_before_they_begin(redis_db: str) -> None:
    async with serving(redis_db) as (client, _):
        info = (await client.get("/server_info")).json()
        assert {it: info[it] for it in ("tp_size", "pp_size", "ep_size", "disaggregation_mode")} == {
            "tp_size": 1, "pp_size": 1, "ep_size": 1, "disaggregation_mode": "null",
        }  # fmt: skip
        assert info["enable_memory_saver"] is False
        assert (await client.get("/get_server_info")).json().keys() == info.keys()
        for path in ("/model_info", "/get_model_info", "/get_weight_version"):
            assert (await client.get(path)).json()["weight_version"] == "0"
        (listed,) = (await client.get("/workers")).json()["workers"]
        assert listed["url"] == str(client.base_url).rstrip("/")
        assert (await client.get("/list_workers")).json()["urls"] == [listed["url"]]
        assert (await client.post("/workers", json={"url": "http://x", "worker_type": "regular"})).status_code == 200
        assert (await client.post("/add_worker?url=http://x")).status_code == 200
        assert (await client.delete(f"/workers/{listed['id']}")).status_code == 200
        assert (await client.get("/flush_cache")).status_code == 200


# --- weights ---------------------------------------------------------------------------------------------------------


async def test_a_folder_becomes_a_version_before_the_answer(redis_db: str, tmp_path: Path) -> None:
    """As slime does it, who deletes the folder then. A worker that comes later has the version, too."""
    source, saved = tmp_path / "trainer", tmp_path / "saved"
    async with serving(redis_db, weights_from=tmp_path, snapshots=saved) as (client, running):
        for version in (1, 2):
            folder = checkpoint(source / f"weight_v{version:06d}", version)
            await done(client, "/pause_generation")
            assert (await client.get("/flush_cache")).status_code == 200
            found = await done(
                client, "/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)}
            )
            shutil.rmtree(folder)
            assert found["success"] is True
            assert (await client.get("/get_weight_version")).json()["weight_version"] == str(version)
            await done(client, "/continue_generation")
            assert (await generated(client, ASKED))["meta_info"]["weight_version"] == str(version)
            assert SnapshotStore(saved / "default").versions()[-1] == version
        async with worker(redis_db) as late:
            await eventually(lambda: late.status.version == 2)
            async with PoolControl(redis_db) as control:
                assert (await control.audit()).clean
        assert running.status.version == 2


@pytest.mark.parametrize("said", ["1", 2, "step_9"])
async def test_a_version_has_one_number_whatever_its_trainer_calls_it(
    redis_db: str, tmp_path: Path, said: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that goes on after a crash begins to count where it was saved. It is told, and so is who asks later."""
    async with serving(redis_db, weights_from=tmp_path) as (client, _), gateway(redis_db) as other:
        for body in ({"weight_version": 2}, {"weight_version": said}):
            folder = checkpoint(tmp_path / f"of {body['weight_version']} {len(caplog.records)}", 1)
            found = await done(client, "/update_weights_from_disk", {"model_path": folder} | body)
        assert (found["weight_version"], found["message"]) == ("3", "The pool serves version 3.")
        assert ("is version 3" in caplog.text) == (said != "step_9")
        named = await done(client, "/update_weight_version", {"new_version": said, "abort_all_requests": False})
        assert named["new_version"] == "3"
        for one in (client, other):
            for path in ("/get_weight_version", "/model_info", "/weight_info"):
                assert (await one.get(path)).json()["weight_version"] == "3", path
            assert (await one.get("/server_info")).json()["internal_states"] == [{"weight_version": "3"}]
            assert (await one.get("/v1/models")).json()["data"][0]["weight_version"] == 3
            info = (await generated(one, ASKED))["meta_info"]
            assert (info["weight_version"], info["weight_versions"][0]["version"]) == ("3", 3)


async def test_slimes_own_folder_is_the_one_that_it_had_pulled(redis_db: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "disk" / "weight_v000001", 1)
    async with serving(redis_db, weights_from=tmp_path) as (client, _):
        pull = {"local_checkpoint_dir": "/nvme/here", "source_dir": str(tmp_path / "disk"), "target_version": 1}
        await done(client, "/pull_weights", pull)
        await done(client, "/update_weights_from_disk", {"model_path": "/nvme/here", "weight_version": "1"})
        assert (await generated(client, ASKED))["meta_info"]["weight_version"] == "1"
        refused(await client.post("/pull_weights", json=pull | {"target_version": 2}), 404)
        refused(await client.post("/pull_weights", json=pull | {"source_dir": "/etc"}), 404)
        refused(await client.post("/pull_weights", json=pull | {"target_version": "x"}), 400)


async def test_weights_come_from_below_the_operators_folder_only(redis_db: str, tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    checkpoint(allowed / "fine", 1)
    checkpoint(outside / "secret", 2)
    (allowed / "link").symlink_to(outside / "secret")
    (allowed / "files").mkdir()
    (allowed / "files" / "model.safetensors").symlink_to(outside / "secret" / "model.safetensors")
    (allowed / "empty").mkdir()
    (allowed / "pickled").mkdir()
    (allowed / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    async with serving(redis_db, weights_from=allowed) as (client, running):
        for path, status in (
            (str(outside / "secret"), 403), ("link", 403), ("files", 403), ("../outside/secret", 403), ("/etc", 403),
            ("nowhere", 404), ("fine\0", 400), ("", 400), (7, 400), (["fine"], 400), (None, 400), ("x" * 5000, 404),
            ("empty", 400), ("pickled", 400), ("fine/model.safetensors", 400),
        ):  # fmt: skip
            answer = await client.post("/update_weights_from_disk", json={"model_path": path})
            assert answer.status_code == status, (path, answer.text)
            lora = await client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
            assert lora.status_code in {status, 400, 500} or path == "fine", (path, lora.text)
        assert running.status.version == 0
        await done(client, "/update_weights_from_disk", {"model_path": "fine"})
    async with serving(redis_db) as (client, _):
        refused(await client.post("/update_weights_from_disk", json={"model_path": "fine"}), 403, "--weights-from")


async def test_a_tenant_with_its_own_pool_brings_weights_to_that(redis_db: str, tmp_path: Path) -> None:
    own = f"pool = 'own'\nweights_from = '{tmp_path / 'a'}'"
    file, keys = keys_file(tmp_path, {"a": own, "b": "", "c": "pool = 'both'", "d": "pool = 'both'"})
    checkpoint(tmp_path / "a" / "v1", 1)
    checkpoint(tmp_path / "b" / "v1", 1)
    settings: dict[str, Any] = {"keys": file, "weights_from": tmp_path / "b"}
    async with worker(redis_db) as shared, serving(redis_db, pool="own", **settings) as (client, running):
        path = "/update_weights_from_disk"
        await done(client, path, {"model_path": "v1"}, headers=bearer(keys["a"]))
        refused(
            await client.post(path, json={"model_path": str(tmp_path / "b" / "v1")}, headers=bearer(keys["a"])), 403
        )
        for name in "bcd":
            refused(await client.post(path, json={"model_path": "v1"}, headers=bearer(keys[name])), 403, "RouteBlocked")
        assert (running.status.version, shared.status.version) == (1, 0)
        models = (await client.get("/v1/models", headers=bearer(keys["a"]))).json()["data"]
        assert [it["weight_version"] for it in models] == [1, 0]


async def test_adapters_of_tenants_that_share_a_pool_do_not_meet(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": "", "b": ""})
    (tmp_path / "lora").mkdir()
    path = adapter(tmp_path / "lora")
    a, b = (bearer(keys[name]) for name in "ab")
    async with serving(redis_db, keys=file, weights_from=tmp_path) as (client, _):
        for _ in range(2):  # the same name, the next version
            found = await done(client, "/load_lora_adapter", {"lora_name": "math", "lora_path": path}, headers=a)
            assert found["success"] is True

        async def listed(headers: dict[str, str]) -> list[str]:
            return [it["id"] for it in (await client.get("/v1/models", headers=headers)).json()["data"]]

        await eventually(lambda: _among("math", listed(a)))
        assert "math" not in await listed(b)
        found = await generated(client, ASKED | {"lora_path": "math"}, headers=a)
        assert len(found["output_ids"]) == 4
        chat = {"prompt": [1], "max_tokens": 2, "model": "math"}
        assert (await client.post("/v1/completions", json=chat, headers=a)).status_code == 200
        for name in ("a::math", "math"):
            answer = await client.post("/generate", json=ASKED | {"lora_path": name}, headers=b)
            assert answer.status_code in {400, 404}, answer.text
            assert (await client.post("/v1/completions", json=chat | {"model": name}, headers=b)).status_code == 404
        await done(client, "/unload_lora_adapter", {"lora_name": "math"}, headers=a)


async def _among(name: str, names: Any) -> bool:
    return name in await names
