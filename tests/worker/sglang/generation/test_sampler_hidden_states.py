"""Hidden states from real SGLang: one row for each generated token, the one its logits were made of."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.engines.asking import ask, judged_states

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Wanted
from rolloutmq.worker.sglang.calls.answer import Shapes, _hidden_arrays
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = [11, 23, 5, 301, 42, 7]
TOLERANCE = 5e-3


def expected(model: Any, request: EngineRequest, output: EngineOutput) -> Any:
    """(new tokens, hidden): of the token before each."""
    states = judged_states(model, [*request.token_ids.tolist(), *output.token_ids.tolist()])
    return states[request.token_ids.size - 1 : -1]


async def test_last_all_and_none_in_one_batch_over_two_legs(engine: SGLangEngine, reference: Any) -> None:
    wishes = ("all", "last", "none", "all")
    requests = [ask([*PROMPT, i], 9, wanted=Wanted(hidden_states=wish)) for i, wish in enumerate(wishes)]
    for leg in range(2):
        outputs = await asyncio.gather(*map(engine.generate, requests))
        for wish, request, output in zip(wishes, requests, outputs, strict=True):
            states = expected(reference, request, output)
            found = {**output.token_arrays, **output.arrays}
            if wish == "none":
                assert found == {}
                continue
            [(name, array)] = found.items()
            assert (name, array.dtype) == ({"all": "hidden_states", "last": "last_hidden_state"}[wish], np.float32)
            np.testing.assert_allclose(array, states if wish == "all" else states[-1], atol=TOLERANCE)
        requests = [
            ask([*r.token_ids.tolist(), *o.token_ids.tolist()], 5, generated=9 * (leg + 1), wanted=r.wanted)
            for r, o in zip(requests, outputs, strict=True)
        ]


async def test_of_an_aborted_request_with_a_prompt_in_the_cache(engine: SGLangEngine, reference: Any) -> None:
    prompt = np.random.default_rng(1).integers(0, 512, 200).tolist()
    await engine.generate(ask(prompt, 1, wanted=Wanted()))
    requests = [ask([*prompt, i], 240, wanted=Wanted(hidden_states="all")) for i in range(2)]
    beside = ask([*prompt, 9], 100, wanted=Wanted())
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await engine.generate(beside)
    assert engine.progress(requests[0].request_id) is None  # without rows it could not be gone on from
    engine.abort_all()
    for request, task in zip(requests, tasks, strict=True):
        output = await task
        assert output.finish_reason == "abort"
        assert output.token_ids.size > 50
        states = output.token_arrays["hidden_states"]
        np.testing.assert_allclose(states, expected(reference, request, output), atol=TOLERANCE)


async def test_more_than_may_travel_is_refused_before_it_runs(engine: SGLangEngine) -> None:
    sampling, wanted = SamplingParams(max_new_tokens=100_000), Wanted(hidden_states="all")
    request = EngineRequest("f" * 44, np.array(PROMPT, np.int32), sampling, 4, "a", wanted=wanted)
    with pytest.raises(RequestRefused, match="hidden_states: 512 bytes for each of up to 100000 tokens"):
        await engine.generate(request)


async def test_bfloat16_travels_bit_by_bit() -> None:
    torch = pytest.importorskip("torch")
    states = torch.randn(3, 8, dtype=torch.bfloat16)
    request = ask(PROMPT, 3, wanted=Wanted(hidden_states="all"))
    rows, _ = _hidden_arrays(request, states.tolist(), 3, Shapes(hidden=8, dtype="bfloat16"))
    found = rows["hidden_states"]
    assert (found.dtype, found.shape) == (np.uint16, (3, 8))
    assert torch.equal(torch.from_numpy(found.copy()).view(torch.bfloat16), states)
    assert np.array_equal((found.astype(np.uint32) << 16).view(np.float32), states.float().numpy())  # as documented
