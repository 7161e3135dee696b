"""More logprobs than those of the sampled tokens, on real SGLang: each value is what transformers computes."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.engines.asking import ask, judged

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.sampling import LogprobOptions, SamplingParams
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Wanted
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = [11, 23, 5, 301, 42, 7]
IDS = (400, 3, 77)
TOLERANCE = 2e-3


def check(
    model: Any, request: EngineRequest, output: EngineOutput, temperature: float, *, prompt: int | None = None
) -> None:
    """Every array there should be, and nothing else. prompt: how many tokens of it, None if it was not asked for."""
    options, earlier = request.wanted.logprobs, request.token_ids.size
    expected = judged(model, [*request.token_ids.tolist(), *output.token_ids.tolist()], temperature)
    own = expected[earlier - 1 : -1]
    rows = np.arange(output.token_ids.size)
    near = {"atol": TOLERANCE, "rtol": 0}
    np.testing.assert_allclose(output.logprobs, own[rows, output.token_ids], **near)
    arrays = dict(output.token_arrays)
    if options.top:
        assert arrays["top_ids"].dtype == np.int32
        assert arrays["top_ids"].shape == arrays["top_logprobs"].shape == (rows.size, options.top)
        np.testing.assert_allclose(arrays.pop("top_logprobs"), np.sort(own)[:, ::-1][:, : options.top], **near)
        best = np.take_along_axis(own, arrays.pop("top_ids").astype(int), 1)
        np.testing.assert_allclose(best, np.sort(own)[:, ::-1][:, : options.top], **near)
    if options.token_ids:
        assert arrays["id_logprobs"].dtype == np.float32
        np.testing.assert_allclose(arrays.pop("id_logprobs"), own[:, options.token_ids], **near)
    assert not arrays
    arrays = dict(output.arrays)
    if prompt is not None:
        of_prompt, tokens = expected[: prompt - 1], request.token_ids[1:prompt]
        found = arrays.pop("prompt_logprobs")
        assert (found.dtype, found.shape) == (np.float32, (prompt,))
        np.testing.assert_allclose(found, [np.nan, *of_prompt[np.arange(prompt - 1), tokens]], **near)
        if options.top:
            found, ids = arrays.pop("prompt_top_logprobs"), arrays.pop("prompt_top_ids")
            assert found.shape == ids.shape == (prompt, options.top)
            assert np.isnan(found[0]).all()
            assert (ids[0] == -1).all()
            np.testing.assert_allclose(found[1:], np.sort(of_prompt)[:, ::-1][:, : options.top], **near)
            np.testing.assert_allclose(found[1:], np.take_along_axis(of_prompt, ids[1:].astype(int), 1), **near)
        if options.token_ids:
            found = arrays.pop("prompt_id_logprobs")
            assert np.isnan(found[0]).all()
            np.testing.assert_allclose(found[1:], of_prompt[:, options.token_ids], **near)
    assert not arrays


async def test_each_request_of_a_batch_gets_what_it_asked_for(engine: SGLangEngine, reference: Any) -> None:
    """Different options side by side, raw and after different temperatures, and somebody who asks for nothing."""
    options = [
        (LogprobOptions(top=5), 0.7),
        (LogprobOptions(token_ids=IDS), 1.3),
        (LogprobOptions(top=2, token_ids=IDS[:1], kind="scaled"), 0.5),
        (LogprobOptions(prompt=True), 0.5),
        (LogprobOptions(prompt=True, top=3, token_ids=IDS, kind="scaled"), 2.0),
        (LogprobOptions(kind="scaled"), 1.7),
        (LogprobOptions(), 1.7),
    ]
    requests = [ask([*PROMPT, i], 12, wanted=Wanted(logprobs=o), temperature=t) for i, (o, t) in enumerate(options)]
    outputs = await asyncio.gather(*map(engine.generate, requests))
    for (option, temperature), request, output in zip(options, requests, outputs, strict=True):
        assert output.token_ids.size == 12
        scale = temperature if option.kind == "scaled" else 1.0
        check(reference, request, output, scale, prompt=len(PROMPT) + 1 if option.prompt else None)


async def test_prompt_logprobs_of_a_long_prompt_that_is_cached(engine: SGLangEngine, reference: Any) -> None:
    """SGLang may not use the cached prefix then: there are no logprobs in it."""
    prompt = np.random.default_rng(0).integers(0, 512, 300).tolist()
    plain = ask(prompt, 2, wanted=Wanted())
    await engine.generate(plain)
    request = ask(prompt, 2, wanted=Wanted(logprobs=LogprobOptions(prompt=True, top=1)))
    check(reference, request, await engine.generate(request), 1.0, prompt=300)


async def test_a_later_leg_never_tells_generated_tokens_as_prompt(engine: SGLangEngine, reference: Any) -> None:
    options = LogprobOptions(prompt=True, top=2, token_ids=IDS)
    first = ask(PROMPT, 6, wanted=Wanted(logprobs=options))
    output = await engine.generate(first)
    so_far = [*PROMPT, *output.token_ids.tolist()]
    again = ask(so_far, 6, generated=6, wanted=Wanted(logprobs=options, prompt=False))
    check(reference, again, await engine.generate(again), 1.0)
    lost = ask(so_far, 6, generated=6, wanted=Wanted(logprobs=options))  # the prompt's were not saved
    check(reference, lost, await engine.generate(lost), 1.0, prompt=len(PROMPT))


async def test_greedy_has_no_temperature(engine: SGLangEngine, reference: Any) -> None:
    request = ask(PROMPT, 6, wanted=Wanted(logprobs=LogprobOptions(top=1, kind="scaled")), temperature=0.0)
    output = await engine.generate(request)
    check(reference, request, output, 1.0)
    assert output.token_ids.tolist() == output.token_arrays["top_ids"][:, 0].tolist()


async def test_a_running_request_tells_its_rows(engine: SGLangEngine, reference: Any) -> None:
    request = ask(PROMPT, 400, wanted=Wanted(logprobs=LogprobOptions(top=2, token_ids=IDS)))
    task = asyncio.create_task(engine.generate(request))
    while (found := engine.progress(request.request_id, 10)) is None or len(found.token_ids) < 50:
        assert not task.done()
        await asyncio.sleep(0)
    engine.abort(request.request_id)
    output = await task
    assert output.finish_reason == "abort"
    check(reference, request, output, 1.0)
    here = slice(10, 10 + len(found.token_ids))
    assert found.token_ids.tolist() == output.token_ids[here].tolist()
    assert found.token_arrays.keys() == output.token_arrays.keys()
    for name, rows in found.token_arrays.items():
        np.testing.assert_array_equal(rows, output.token_arrays[name][here])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (LogprobOptions(token_ids=(3, 512)), "logprobs.token_ids has 512: token ids of this model are 0 to 511"),
        (LogprobOptions(token_ids=tuple(range(512))), "logprobs.token_ids: 2048 bytes for each of up to 30000 tokens"),
    ],
)
async def test_refused_with_the_reason(engine: SGLangEngine, options: LogprobOptions, text: str) -> None:
    request = EngineRequest(
        "f" * 44,
        np.array(PROMPT, np.int32),
        SamplingParams(max_new_tokens=30_000),
        4,
        "a",
        wanted=Wanted(logprobs=options),
    )
    with pytest.raises(RequestRefused, match=text):
        await engine.generate(request)
