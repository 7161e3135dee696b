"""How much of its KV cache an engine says that requests hold, which have a token, and which is scheduled first."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.engines.fixtures import KV_TOKENS, MAX_RUNNING
from support.engines.manual import all_that_can_happen_now
from support.pools.pool import eventually

from rolloutmq.messages import SamplingParams
from rolloutmq.worker.engine import EngineRequest
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]


async def test_what_requests_hold_counts_and_what_the_prefix_cache_keeps_does_not(engine: SGLangEngine) -> None:
    prompt = np.arange(300, 350, dtype=np.int32)
    request = EngineRequest("e" * 44, prompt, SamplingParams(ignore_eos=True), 900, "kv-use")
    running = asyncio.create_task(engine.generate(request))

    async def used() -> int:
        told = await engine.operate("kv_use", {})
        assert told["tokens"] == KV_TOKENS
        return int(told["used"])

    async def held() -> bool:
        return running.done() or await used() >= len(prompt)

    async def released() -> bool:
        return await used() == 0

    await eventually(held)
    assert not running.done()
    engine.abort(request.request_id)
    assert (await running).token_ids.size < 900
    await eventually(released)
    again = await engine.generate(EngineRequest("f" * 44, prompt, SamplingParams(), 1, "kv-use"))
    assert again.cached_tokens > 0


async def test_who_has_a_token_is_named_and_who_is_still_read_is_not(engine: SGLangEngine) -> None:
    rng = np.random.default_rng(5)
    requests = [
        EngineRequest(
            f"{number:044x}", rng.integers(3, 250, 40).astype(np.int32), SamplingParams(ignore_eos=True), 900, "who"
        )
        for number in range(MAX_RUNNING + 1)  # one waits
    ]

    async def going() -> set[str]:
        return set((await engine.operate("generated", {}))["requests"])

    assert await going() == set()
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    first = {request.request_id for request in requests[:MAX_RUNNING]}

    async def all_go() -> bool:
        return await going() == first

    await eventually(all_go)
    engine.abort(requests[0].request_id)
    await running[0]

    async def the_last_goes() -> bool:
        return await going() == {request.request_id for request in requests[1:]}

    await eventually(the_last_goes)
    engine.abort_all()
    await asyncio.gather(*running)
    assert await going() == set()


async def test_of_what_waits_the_highest_number_is_scheduled_first(engine: SGLangEngine) -> None:
    """All slots are taken by requests that stay, and one is freed once the others wait: they run one after another."""
    params = SamplingParams(ignore_eos=True)
    prompt = np.arange(100, 110, dtype=np.int32)
    stay = [EngineRequest(f"{100 + number:044x}", prompt, params, 900, "slots") for number in range(MAX_RUNNING)]
    numbers = (0, 5, -3, 9, 1, 5)
    wait = [
        EngineRequest(f"{200 + place:044x}", prompt, params, 3, "slots", priority=number)
        for place, number in enumerate(numbers)
    ]
    staying = [asyncio.create_task(engine.generate(request)) for request in stay]

    async def all_slots_taken() -> bool:
        return len((await engine.operate("generated", {}))["requests"]) == MAX_RUNNING

    await eventually(all_slots_taken)
    ended: list[int] = []

    async def run(request: EngineRequest) -> None:
        await engine.generate(request)
        ended.append(request.priority)

    waiting = [asyncio.create_task(run(request)) for request in wait]
    manager = engine._current().manager
    await eventually(lambda: all(request.request_id in manager.rid_to_state for request in wait))
    await all_that_can_happen_now()
    engine.abort(stay[0].request_id)
    await asyncio.gather(*waiting)
    preempted = any(task.done() for task in staying[1:])
    engine.abort_all()
    await asyncio.gather(*staying)
    assert (ended, preempted) == (sorted(numbers, reverse=True), False)
