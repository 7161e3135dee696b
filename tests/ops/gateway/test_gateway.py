"""The gateway over real HTTP, with scripted workers: keys, sessions, versions, tenants, answers later."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.gateways import gateway
from support.pools.pool import Running, eventually, letters, runs, worker

from rolloutmq import RolloutClient
from rolloutmq.messages import ConfigError
from rolloutmq.messages.broker import Broker
from rolloutmq.ops.gateway import Gateway, Settings, application, new_key, pool_gateway
from rolloutmq.producer.data import Texts
from rolloutmq.worker.scripted.engine import ScriptedEngine

PROMPT = {"prompt": [1, 2, 3], "max_tokens": 4, "return_token_ids": True}


def sampled(answer: httpx.Response) -> list[list[int]]:
    """The ids of each choice of an answer that is one."""
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def events(text: str) -> list[Any]:
    """The data of a stream of events; its last one is [DONE]."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


@pytest.fixture
async def served(redis_db: str) -> AsyncIterator[tuple[httpx.AsyncClient, Running]]:
    async with worker(redis_db) as running, gateway(redis_db) as client:

        async def ready() -> bool:
            return (await client.get("/health")).status_code == 200

        await eventually(ready)
        yield client, running


@pytest.fixture
async def slow(redis_db: str) -> AsyncIterator[tuple[httpx.AsyncClient, Running]]:
    """Its worker takes seconds for an answer."""
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=2.0)) as running, gateway(redis_db) as client:
        yield client, running


Served = tuple[httpx.AsyncClient, Running]


async def test_the_page_has_every_route() -> None:
    app = application(Gateway(Settings("redis://127.0.0.1:1")))
    paths = json.loads((Path(__file__).parents[3] / "ops/gateway/openapi.json").read_text())["paths"]
    said = {(method.upper(), path) for path, its in paths.items() for method in its.keys() - {"parameters"}}
    there = {(it, route.path) for route in app.routes for it in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    assert said <= there
    assert {path for _, path in there} == {path for _, path in said}


async def test_an_answer_says_what_was_sampled_under_which_weights(served: Served) -> None:
    client, running = served
    answer = await client.post("/v1/completions", json=PROMPT | {"n": 2, "logprobs": 0, "prompt": [[1, 2], [3]]})
    assert len(sampled(answer)) == 4
    assert {len(ids) for ids in sampled(answer)} == {4}
    body = answer.json()
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (body["weight_version"], body["model"]) == (0, "scripted")
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2]] * 2 + [[3]] * 2
    assert running.generation.finished == 4


async def test_a_stream_has_the_tokens_of_a_whole_answer(served: Served) -> None:
    client, _ = served
    body = PROMPT | {"prompt": [[1, 2], [3]], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await client.post("/v1/completions", json=body)).text)
    *chunks, last = chunks
    ids: dict[int, list[int]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert {index: len(its) for index, its in ids.items()} == dict.fromkeys(range(4), 4)
    assert last["usage"]["total_tokens"] == 3 + 16


async def test_a_request_with_a_key_has_one_answer_through_any_gateway(redis_db: str) -> None:
    async with worker(redis_db) as running, gateway(redis_db) as one, gateway(redis_db) as other:
        body = PROMPT | {"request_id": "r-1"}
        answers = await asyncio.gather(*(its.post("/v1/completions", json=body) for its in (one, other) * 4))
        assert len({answer.content for answer in answers}) == 1
        assert running.generation.finished == 1
        header = {"Idempotency-Key": "r-1"}
        assert (await other.post("/v1/completions", json=PROMPT, headers=header)).status_code == 422  # another body
        again = events((await one.post("/v1/completions", json=body | {"stream": True, "request_id": "r-2"})).text)
        fetched = await other.get("/v1/requests/r-2")
        assert again[0]["choices"][0]["token_ids"] == sampled(fetched)[0]
        assert running.generation.finished == 2


async def test_a_failure_is_the_answer_too_and_no_dead_letter(served: Served, broker: Broker) -> None:
    client, running = served
    body = {"messages": [{"role": "user", "content": "hi"}], "request_id": "r-1"}  # nobody here has a tokenizer
    answers = [await client.post("/v1/chat/completions", json=body) for _ in range(2)]
    assert [refused(answer)[0] for answer in answers] == [400, 400]
    assert "no tokenizer" in answers[1].json()["error"]["message"]
    assert running.generation.finished == 0
    assert await letters(broker) == []


async def test_an_enqueued_request_is_fetched_later_and_can_be_cancelled(slow: Served) -> None:
    client, running = slow
    accepted = await client.post("/v1/completions", json=PROMPT | {"enqueue": True, "prompt": [[1], [2]]})
    assert (accepted.status_code, accepted.json()["status"]) == (202, "queued")
    place = f"/v1/requests/{accepted.json()['id']}"
    assert (await client.get(place)).status_code == 202
    await eventually(lambda: runs(running.engine, 2))
    assert len(sampled(await client.get(f"{place}?wait=60"))) == 2
    assert (await client.get(f"{place}?wait=x")).status_code == 400
    accepted = await client.post("/v1/completions", json=PROMPT | {"enqueue": True, "request_id": "r-2"})
    await eventually(lambda: runs(running.engine, 1))
    assert (await client.delete("/v1/requests/r-2")).status_code == 200
    await eventually(lambda: running.generation.running == 0)
    assert refused(await client.get("/v1/requests/r-2"))[0] == 408
    assert (await client.delete("/v1/requests/r-2")).status_code == 200
    assert refused(await client.get("/v1/requests/r-2")) == (404, "no_such_request")
    assert running.generation.finished == 2


@pytest.mark.parametrize(
    ("path", "headers", "more"),
    [
        ("/sessions/s/v1/completions", {}, {}),
        ("/v1/completions", {"X-Session-ID": "s"}, {}),
        ("/v1/completions", {"X-SMG-Routing-Key": "s"}, {}),
        ("/v1/completions", {}, {"session_id": "s"}),
    ],
)
async def test_turns_of_a_session_are_there_for_the_trainer(
    served: Served, redis_db: str, path: str, headers: dict[str, str], more: dict[str, Any]
) -> None:
    client, _ = served
    (first,) = sampled(await client.post(path, json=PROMPT | more, headers=headers))
    longer = PROMPT | more | {"prompt": [1, 2, 3, *first, 9], "stream": True}
    (chunk,) = events((await client.post(path, json=longer, headers=headers)).text)
    second = chunk["choices"][0]["token_ids"]
    async with RolloutClient(redis_db) as trainer:
        assert [(it.name, it.turns, it.taken) async for it in trainer.sessions()] == [("s", 2, False)]
        (row,) = (await trainer.take_session("s")).rows(reward=1.0)
    assert row.ids.tolist() == [1, 2, 3, *first, 9, *second]
    assert row.mask.tolist() == [0] * 3 + [1] * 4 + [0] + [1] * 4
    assert np.all(row.logprobs[row.mask == 1] < 0)
    late = await client.post(path, json=PROMPT | more, headers=headers)
    assert refused(late) == (409, "session_taken")


async def test_a_repeat_of_what_somebody_listens_to_is_a_request_of_its_own(slow: Served, redis_db: str) -> None:
    """OpenAI's client says that it repeats also after a refusal, when nothing had run."""
    client, running = slow
    path, again = "/sessions/s/v1/completions", {"x-stainless-retry-count": "1"}
    async with gateway(redis_db) as other:
        first = asyncio.create_task(client.post(path, json=PROMPT))
        await eventually(lambda: runs(running.engine, 1))
        rest = (other.post(path, json=PROMPT, headers=it) for it in (again, {}))
        answers = [sampled(it)[0] for it in await asyncio.gather(first, *rest)]
    assert len({*map(tuple, answers)}) == len(answers) == 3
    async with RolloutClient(redis_db) as trainer:
        assert len((await trainer.take_session("s")).turns) == 3
        assert await trainer.broker.redis.keys("*:request:*") == []


async def test_a_client_that_gave_up_and_asks_again_has_one_turn(slow: Served, redis_db: str) -> None:
    client, _ = slow
    path = "/sessions/s/v1/completions"
    with pytest.raises(httpx.ReadTimeout):
        await client.post(path, json=PROMPT, timeout=0.5)
    again = await client.post(path, json=PROMPT, headers={"x-stainless-retry-count": "1"})
    async with RolloutClient(redis_db) as trainer:
        (turn,) = (await trainer.take_session("s")).turns
    assert turn.token_ids.tolist() == sampled(again)[0]


async def test_a_taken_session_is_refused_before_anything_runs(served: Served) -> None:
    client, running = served
    path = "/sessions/s/v1/completions"
    await client.post(path, json=PROMPT)
    assert (await client.post("/finish_session", params={"session_id": "s"})).json() == {"status": "ok", "closed": True}
    for more in ({}, {"stream": True}):
        late = await client.post(path, json=PROMPT | more)
        assert refused(late) == (409, "session_taken")
        assert late.headers["x-should-retry"] == "false"
    assert running.generation.finished == 1
    other = await client.post("/finish_session", params={"session_id": "other"})
    assert other.json() == {"status": "ok", "closed": False}


async def test_a_cancelled_request_is_told_to_all_who_wait_for_it(slow: Served, redis_db: str) -> None:
    client, running = slow
    async with gateway(redis_db) as other:
        asked = [
            asyncio.create_task(it.post("/v1/completions", json=PROMPT | {"request_id": "r"})) for it in (client, other)
        ]
        await eventually(lambda: runs(running.engine, 1))
        assert (await other.delete("/v1/requests/r")).status_code == 200
        assert [refused(await it)[0] for it in asked] == [408, 408]
    assert running.generation.finished == 0


async def test_tenants_with_one_key_do_not_end_each_other(redis_db: str, tmp_path: Path) -> None:
    made = [new_key() for _ in range(2)]
    file = tmp_path / "keys.toml"
    file.write_text("".join(f"[tenants.t{number}]\nkeys = ['{line}']\n" for number, (_, line) in enumerate(made)))
    file.chmod(0o600)
    one, other = ({"x-api-key": key, "x-session-id": "s"} for key, _ in made)
    async with worker(redis_db, engine=ScriptedEngine(tokens_per_s=4.0)), gateway(redis_db, keys=file) as client:
        stays = asyncio.create_task(client.post("/v1/completions", json=PROMPT, headers=one))
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=PROMPT, headers=other, timeout=0.3)
        assert len(sampled(await stays)) == 1


async def test_a_version_that_nobody_has_is_refused_or_waited_for(served: Served) -> None:
    client, _ = served
    for wanted in ({"min_version": 3}, {"exact_version": 3, "min_version": 0}):
        answer = await client.post("/v1/completions", json=PROMPT | {"weight_version": wanted})
        assert answer.status_code == 409
        body = answer.json()
        assert (body["type"], body["target_version"], body["applied"]) == ("WeightVersionNotReady", 3, 0)
    wait = {"x-weight-version-wait": "-1"}
    answer = await client.post("/v1/completions", json=PROMPT | {"weight_version": {"min_version": 3}}, headers=wait)
    assert answer.status_code == 400
    answer = await client.post("/v1/completions", json=PROMPT | {"weight_version": {"exact_version": 0}})
    assert (answer.json()["weight_version_start"], answer.json()["weight_version_end"]) == (0, 0)


async def test_tenants_see_nothing_of_each_other(redis_db: str, tmp_path: Path, broker: Broker) -> None:
    (key_a, line_a), (key_b, line_b) = new_key(), new_key()
    file = tmp_path / "keys.toml"
    limits = "requests_per_minute = 3\npriority = 'low'"
    file.write_text(f"[tenants.a]\nkeys = ['{line_a}']\n{limits}\n[tenants.b]\nkeys = ['{line_b}']\n")
    file.chmod(0o600)
    a, b = ({"Authorization": f"Bearer {key}"} for key in (key_a, key_b))
    async with worker(redis_db) as running, gateway(redis_db, keys=file) as client:
        assert refused(await client.post("/v1/completions", json=PROMPT)) == (401, "invalid_api_key")
        body = PROMPT | {"request_id": "r", "session_id": "s"}
        answers = [sampled(await client.post("/v1/completions", json=body, headers=it)) for it in (a, b)]
        assert answers[0] != answers[1]
        assert running.generation.finished == 2
        await client.post("/v1/completions", json=PROMPT, headers=a)
        await client.post("/v1/completions", json=PROMPT, headers=a)
        late = await client.post("/v1/completions", json=PROMPT, headers=a)
        assert refused(late) == (429, "rate_limit_exceeded")
        assert int(late.headers["retry-after"]) > 0
        async with RolloutClient(redis_db) as trainer:
            assert [len((await trainer.take_session("s", tenant=it)).turns) for it in "ab"] == [1, 1]
        refusal = await client.get("/v1/requests/r", headers={"Authorization": "Bearer nobody"})
        assert refusal.status_code == 401


@asynccontextmanager
async def limited(redis_db: str, tmp_path: Path, limits: str, **engine: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway for one tenant with these limits, and its worker."""
    (key, line), file = new_key(), tmp_path / "keys.toml"
    file.write_text(f"[tenants.a]\nkeys = ['{line}']\n{limits}\n")
    file.chmod(0o600)
    async with worker(redis_db, engine=ScriptedEngine(**engine)), gateway(redis_db, keys=file) as client:
        client.headers["x-api-key"] = key
        yield client


async def test_one_request_at_a_time_is_served_one_after_the_other(redis_db: str, tmp_path: Path) -> None:
    async with limited(redis_db, tmp_path, "max_running = 1") as client:
        for more in ({}, {"stream": True}, {"session_id": "s"}, {"request_id": "r"}) * 3:
            assert (await client.post("/v1/completions", json=PROMPT | more)).status_code == 200


async def test_a_repeat_costs_nothing_and_who_hangs_up_pays(redis_db: str, tmp_path: Path) -> None:
    async with limited(redis_db, tmp_path, "tokens_per_day = 30", tokens_per_s=8.0) as client:
        for _ in range(4):
            sampled(await client.post("/v1/completions", json=PROMPT | {"request_id": "r"}))  # 7 tokens, once
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", json=PROMPT | {"request_id": "q", "max_tokens": 12}, timeout=0.2)
        late = await client.post("/v1/completions", json=PROMPT | {"max_tokens": 12})
        assert refused(late) == (429, "insufficient_quota")
        assert len(sampled(await client.get("/v1/requests/q?wait=60"))[0]) == 12


async def test_weights_that_would_have_to_be_unpickled_are_not_for_a_gateway(served: Served) -> None:
    client, _ = served
    for name in ("update_weights_from_tensor", "update_weights_from_ipc", "stage_weight_update"):
        answer = await client.post(f"/{name}", json={})
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "RouteBlocked")


async def test_bad_requests_name_what_is_wrong(served: Served) -> None:
    client, _ = served
    for body, param in (
        ({"prompt": []}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": 7}, "prompt"),
        (PROMPT | {"temprature": 1}, "temprature"),
        (PROMPT | {"max_tokens": 2_000_000}, "max_tokens"),
        (PROMPT | {"session_id": ["a"]}, "session_id"),
        (PROMPT | {"session_id": "a b"}, "session_id"),
        (PROMPT | {"request_id": 7}, "request_id"),
        (PROMPT | {"weight_version": 7}, "weight_version"),
        (PROMPT | {"model": {"a": 1}}, "model"),
    ):
        answer = await client.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert refused(await client.post("/v1/completions", content=b"[]")) == (400, "invalid_json")
    assert refused(await client.post("/v1/completions", json=PROMPT | {"model": "no"})) == (404, "model_not_found")
    assert (await client.post("/v1/completions", json=PROMPT | {"model": None})).json()["model"] == "scripted"
    assert refused(await client.get("/v1/nothing"))[0] == 404
    assert refused(await client.get("/v1/models/none")) == (404, "model_not_found")
    assert (await client.get("/v1/models/scripted")).json()["id"] == "scripted"
    assert refused(await client.get("/v1/completions"))[0] == 405


async def test_a_tokenizer_that_takes_long_holds_nobody_up(redis_db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is loaded once, however many ask, and workers make tokens until it is there."""
    begun, go_on = list[Texts](), threading.Event()

    def load(texts: Texts) -> Any:
        begun.append(texts)
        go_on.wait(60)
        raise ConfigError("there is none")

    monkeypatch.setattr(Texts, "load", load)
    monkeypatch.setattr(pool_gateway, "LOADING_S", 0.1)
    try:
        async with worker(redis_db), gateway(redis_db) as client:
            answers = await asyncio.gather(*(client.post("/v1/completions", json=PROMPT) for _ in range(8)))
            assert [len(sampled(it)[0]) for it in answers] == [4] * 8
            assert len(begun) == 1
            go_on.set()
    finally:
        go_on.set()


async def test_health_says_why_it_is_not_ready(redis_db: str) -> None:
    async with gateway(redis_db) as client:
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        assert answer.json()["reason"]
        async with worker(redis_db):

            async def ready() -> bool:
                return (await client.get("/health")).status_code == 200

            await eventually(ready)


async def test_chats_stream_no_meta_info_as_at_sglang(redis_db: str) -> None:
    """The installed one answers 400, so that no trainer takes a stream without it for one that has it."""
    chat = {"messages": [{"role": "user", "content": "-"}], "input_ids": [1, 2], "return_meta_info": True}
    async with worker(redis_db), gateway(redis_db) as client:
        answer = await client.post("/v1/chat/completions", json=chat | {"stream": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_meta_info")
        whole = (await client.post("/v1/chat/completions", json=chat | {"max_tokens": 2, "logprobs": True})).json()
        info = whole["choices"][0]["meta_info"]
        assert len(info["output_token_logprobs"]) == info["completion_tokens"] == 2
