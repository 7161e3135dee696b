"""The server of verl's replica, and the sender of the trainer's weights, over a pool."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from uuid import uuid4

import pytest
import torch
from redis.asyncio import Redis
from support.pools.pool import eventually, worker

from rolloutmq.messages.errors import FeatureUnavailable, InvalidField, JobFailed
from rolloutmq.producer.verl import PoolServer, PoolSettings, PoolWeights
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.scripted.engine import ScriptedEngine

PARAMS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def server(url: str, prefer_s: float = 30.0, **more: Any) -> PoolServer:
    return PoolServer(
        PoolSettings(redis_url=url, prefer_s=prefer_s),
        **({"prompt_length": 8, "response_length": 6, "logprobs_mode": "raw_logprobs"} | more),
    )


async def test_a_request_gets_the_fields_of_a_token_output(redis_db: str, serving: None) -> None:
    made = server(redis_db)
    try:
        output = await made.generate([1, 2, 3], PARAMS, "r1")
        assert output["stop_reason"] == "length"
        assert len(output["token_ids"]) == len(output["log_probs"]) == 6
        assert all(isinstance(token, int) for token in output["token_ids"])
        steps = dict.fromkeys(("global_steps", "min_global_steps", "max_global_steps"))
        assert output["extra_fields"] == steps | {"num_cached_tokens": output["extra_fields"]["num_cached_tokens"]}
        without = await made.generate([1, 2, 3], PARAMS | {"logprobs": False, "max_tokens": 2}, "r2")
        assert (len(without["token_ids"]), without["log_probs"]) == (2, None)
    finally:
        await made.aclose()


@pytest.mark.parametrize("cut", [0, 1])
async def test_the_turns_of_a_conversation_stay_with_the_worker_that_has_their_prefix(
    redis_db: str, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """As verl sends them: a request id for each turn. cut: of an answer, tokens that the next turn begins without."""
    asked: set[tuple[int, ScriptedEngine]] = set()
    generate = ScriptedEngine.generate

    async def noted(self: ScriptedEngine, request: EngineRequest) -> EngineOutput:
        asked.add((int(request.token_ids[0]), self))
        return await generate(self, request)

    monkeypatch.setattr(ScriptedEngine, "generate", noted)
    made = server(redis_db, prompt_length=200)
    histories = [[number, 2, 3] for number in range(16)]
    async with worker(redis_db, engine=ScriptedEngine(200)), worker(redis_db, engine=ScriptedEngine(200)):
        for _ in range(4):
            outputs = await asyncio.gather(*(made.generate(told, PARAMS, uuid4().hex) for told in histories))
            for told, output in zip(histories, outputs, strict=True):
                told.extend([*output["token_ids"][: 6 - cut], 0, 0])
        await made.aclose()
    assert len({engine for _, engine in asked}) == 2
    assert len(asked) == len(histories)  # each of them with one engine


@pytest.mark.one_shard
async def test_a_turn_waits_for_its_worker_as_long_as_the_settings_say(redis_db: str, db: Redis) -> None:
    made = server(redis_db, prefer_s=1.5)
    async with worker(redis_db):
        first = await made.generate([1, 2, 3], PARAMS, "r1")
    turn = asyncio.create_task(made.generate([1, 2, 3, *first["token_ids"]], PARAMS, "r2"))

    async def preference() -> list[bytes]:
        jobs = [await db.hvals(key) async for key in db.scan_iter("*:job:*")]
        return [value for job in jobs for value in job if re.fullmatch(rb"\d+@[\w.-]+", value)]

    assert [it.partition(b"@")[0] for it in await eventually(preference)] == [b"1500"]
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    await made.aclose()


@pytest.mark.parametrize(
    ("prompt", "limits", "longest", "room"),
    [
        (3, {}, None, 6),
        (10, {}, None, 4),  # prompt_length + response_length are 14
        (14, {}, None, 0),
        (3, {"max_tokens": 40}, None, 40),
        (3, {"max_new_tokens": 40}, 12, 8),
        (12, {}, 12, 0),
    ],
)
@pytest.mark.usefixtures("serving")
async def test_a_response_is_as_long_as_verls_own_servers_let_it_be(
    redis_db: str, prompt: int, limits: dict[str, int], longest: int | None, room: int
) -> None:
    made = server(redis_db, max_model_len=longest)
    try:
        output = await made.generate([5] * prompt, PARAMS | limits, "r")
    finally:
        await made.aclose()
    assert (len(output["token_ids"]), output["stop_reason"]) == (room, "length")


async def test_what_cannot_be_honoured_is_refused_by_name(redis_db: str) -> None:
    made = server(redis_db)
    with pytest.raises(InvalidField, match="image=<object"):
        await made.generate([1], PARAMS, "r", image_data=[object()])
    with pytest.raises(FeatureUnavailable, match=r"mm_processor_kwargs\.min_pixels"):
        await made.generate([1], PARAMS, "r", audio_data=[[0.0]], mm_processor_kwargs={"min_pixels": 4})
    with pytest.raises(InvalidField, match="max_tokens"):
        await made.generate([1], PARAMS | {"max_tokens": "many"}, "r")
    with pytest.raises(InvalidField, match="token_ids"):
        await made.generate([1, -1], PARAMS, "r")
    with pytest.raises(InvalidField, match="best_of"):
        await made.generate([1], PARAMS | {"best_of": 3}, "r")
    with pytest.raises(InvalidField, match="pol"):
        PoolSettings.of({"rolloutmq": {"pol": "math"}})
    assert PoolSettings.of({"sglang": {}, "rolloutmq": {"pool": "math"}}).pool == "math"


async def test_a_request_that_the_pool_gives_up_raises(redis_db: str) -> None:
    made = server(redis_db)
    request = asyncio.create_task(made.generate([1, 2], PARAMS, "r"))
    client = made._open()
    await eventually(lambda: client.outstanding == 1)
    assert await eventually(client.cancel_all) == 1
    with pytest.raises(JobFailed):
        await request
    await made.aclose()


async def test_a_version_is_committed_when_publish_returns_and_requests_know_its_step(
    redis_db: str, serving: None
) -> None:
    made = server(redis_db)
    told: list[tuple[int, int | None]] = []

    async def tell(version: int, global_steps: int | None) -> None:
        told.append((version, global_steps))
        await made.set_global_steps(version, global_steps)

    weights = PoolWeights(PoolSettings(redis_url=redis_db), leader=True, tell=tell)
    try:
        for step in (0, 1, 1):  # a trainer that is restored publishes a step again
            metrics = await weights.publish([("w", torch.full((4,), float(step)))], step)
            output = await made.generate([1, 2, 3], PARAMS, "r")
            fields = output["extra_fields"]
            assert fields["min_global_steps"] == fields["global_steps"] == fields["max_global_steps"] == step
            assert metrics["rolloutmq/workers"] == 1
    finally:
        weights.close()
        await made.aclose()
    assert told == [(1, 0), (2, 1), (3, 1)]
