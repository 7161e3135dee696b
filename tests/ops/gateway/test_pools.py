"""Several pools behind one gateway: whose they are, which of them a model is in, and keys in paths."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from support.gateways import gateway
from support.keys import bearer, keys_file
from support.pools.pool import Running, eventually, worker

from rolloutmq import RolloutClient
from rolloutmq.messages.errors import ConfigError
from rolloutmq.ops.gateway.tenants import Tenants
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}


class Named(ScriptedEngine):
    """An engine with a model of another name."""

    def __init__(self, model: str, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self._model = model

    @property
    def info(self):  # type: ignore[no-untyped-def]
        from dataclasses import replace  # noqa: PLC0415

        return replace(super().info, model=self._model)


@contextlib.asynccontextmanager
async def pools(url: str, *names: str) -> AsyncIterator[dict[str, Running]]:
    """A worker in each of these pools, whose model has the pool's name."""
    async with contextlib.AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(worker(url, engine=Named(name), pool=name)) for name in names}


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_model_chooses_the_pool(redis_db: str) -> None:
    names = ("policy", "judge")
    async with pools(redis_db, *names) as running, gateway(redis_db, pools=names) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(it["id"], it["weight_version"]) for it in listed] == [("policy", 0), ("judge", 0)]
        for model in (None, "judge", "judge"):
            body = PROMPT | ({} if model is None else {"model": model})
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["model"] == (model or "policy")
        assert [running[name].generation.finished for name in names] == [1, 2]
        unknown = await client.post("/v1/completions", json=PROMPT | {"model": "teacher"})
        assert refused(unknown) == (404, "model_not_found")
        assert "judge, policy" in unknown.json()["error"]["message"]
        assert (await client.get("/v1/models/judge")).json()["id"] == "judge"
        kept = PROMPT | {"model": "judge", "request_id": "r", "session_id": "s"}
        first = (await client.post("/v1/completions", json=kept)).json()
        assert (await client.get("/v1/requests/r")).json()["choices"] == first["choices"]
        async with RolloutClient(redis_db, "judge") as trainer:
            assert len((await trainer.take_session("s")).turns) == 1


async def test_a_tenants_own_pool_is_nobody_elses(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": "pool = 'own'", "b": ""})
    async with pools(redis_db, "own", "shared") as running, gateway(redis_db, pools=["shared"], keys=file) as client:
        listed = {
            name: [it["id"] for it in (await client.get("/v1/models", headers=bearer(key))).json()["data"]]
            for name, key in keys.items()
        }
        assert listed == {"a": ["own", "shared"], "b": ["shared"]}
        for key in keys.values():
            assert (await client.post("/v1/completions", json=PROMPT, headers=bearer(key))).status_code == 200
        assert [running[name].generation.finished for name in ("own", "shared")] == [1, 1]
        other = await client.post("/v1/completions", json=PROMPT | {"model": "own"}, headers=bearer(keys["b"]))
        assert refused(other) == (404, "model_not_found")
        assert "own" not in other.json()["error"]["message"].removeprefix("The model 'own'")


async def test_quotas_are_over_all_pools(redis_db: str, tmp_path: Path) -> None:
    file, keys = keys_file(tmp_path, {"a": "pool = 'own'\ntokens_per_day = 20"})
    async with pools(redis_db, "own", "shared"), gateway(redis_db, pools=["shared"], keys=file) as client:
        client.headers.update(bearer(keys["a"]))
        for model, status in (("own", 200), ("shared", 200), ("own", 429)):
            answer = await client.post("/v1/completions", json=PROMPT | {"model": model})
            assert answer.status_code == status, answer.text


async def test_a_key_in_the_path_is_a_key_and_in_no_log(
    redis_db: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, keys = keys_file(tmp_path, {"a": ""})
    caplog.set_level(logging.INFO)
    async with worker(redis_db), gateway(redis_db, keys=file) as client:
        for path in ("/v1/completions", "/sessions/s/v1/completions"):
            answer = await client.post(f"/t/{keys['a']}{path}", json=PROMPT, headers={"Authorization": "Bearer EMPTY"})
            assert answer.status_code == 200, answer.text
        listed = (await client.get(f"/t/{keys['a']}/workers")).json()["workers"]
        assert [it["url"].endswith(f"/t/{keys['a']}") for it in listed] == [True]
        for path in ("/t/nobody/v1/models", "/t/", "/t/%ff/v1/models", f"/t/{keys['a']}x/v1/models", "/v1/models"):
            assert (await client.get(path)).status_code in {401, 404}, path

        async def ready() -> bool:
            return (await client.get(f"/t/{keys['a']}/health")).status_code == 200

        await eventually(ready)
    assert keys["a"] not in "".join(it.getMessage() for it in caplog.records if not it.name.startswith("httpx"))
    assert '"POST /t/-/v1/completions" 200' in caplog.text


async def test_who_sends_no_key_is_the_ports_tenant(redis_db: str, tmp_path: Path) -> None:
    file, _ = keys_file(tmp_path, {"a": "", "b": ""})
    async with worker(redis_db), gateway(redis_db, keys=file, tenant="b") as client:
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer("wrong"))).status_code == 401
        await client.post("/v1/completions", json=PROMPT | {"session_id": "s"})
        async with RolloutClient(redis_db) as trainer:
            assert len((await trainer.take_session("s", tenant="b")).turns) == 1
        file.write_text(file.read_text().replace("tenants.b", "tenants.c"))

        async def gone() -> bool:
            return (await client.get("/v1/models")).status_code == 401

        await eventually(gone)
    with pytest.raises(ConfigError, match="has no tenant b"):
        Tenants.load(file, "b")
