"""Least lengths and penalties in real SGLang, about the whole sample; transformers is the judge."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.remote import RemoteEngine
from support.engines.text_requests import EOS, PROMPT, Engine, in_legs, request

from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.sglang import engine as engine_module
from rolloutmq.worker.sglang.engine import SGLangEngine
from rolloutmq.worker.sglang.wire import sglang_request

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.shared_engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
]
TOLERANCE = 5e-4
"""Of a log-probability; both sides compute in float32, in batches of different shapes."""


@pytest.fixture(scope="session")
def text_reference(text_model: Path) -> Any:
    """The model of `text_engine` in transformers."""
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    return Qwen2ForCausalLM.from_pretrained(text_model, dtype="float32").eval()


@pytest.fixture(params=["normal, no tokenizer", "overlap, tokenizer"])
def judged(request: pytest.FixtureRequest) -> tuple[Engine, Any, set[int]]:
    """An engine, its model in transformers, and its end-of-sequence tokens."""
    if request.param.startswith("normal"):
        return request.getfixturevalue("engine"), request.getfixturevalue("reference"), set()
    return request.getfixturevalue("text_engine"), request.getfixturevalue("text_reference"), {EOS}


def check(model: Any, asked: EngineRequest, output: EngineOutput, ends: set[int]) -> None:
    """Each token is the likeliest of the model's distribution with these penalties, and has its log-probability."""
    import torch  # noqa: PLC0415

    tokens, sampling = output.token_ids.tolist(), asked.sampling
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, len(PROMPT) - 1 : -1].float().numpy()
    for place, token in enumerate(tokens):
        row = penalised(logits[place].copy(), tokens[:place], sampling)
        for end in {*ends, *sampling.stop_token_ids} if place < sampling.min_new_tokens else ():
            row[end] = -np.inf
        for biased, bias in sampling.logit_bias.items():
            row[biased] += bias
        row -= row.max() + np.log(np.exp(row - row.max()).sum())
        assert abs(row[token] - output.logprobs[place]) < TOLERANCE, place
        assert row[token] > row.max() - TOLERANCE, place


def penalised(row: np.ndarray, before: list[int], sampling: SamplingParams) -> np.ndarray:
    """SGLang's definition: subtracted first, then scaled; of generated tokens, not of the prompt."""
    for token in set(before):
        row[token] -= sampling.frequency_penalty * before.count(token) + sampling.presence_penalty
        row[token] *= sampling.repetition_penalty if row[token] < 0 else 1 / sampling.repetition_penalty
    return row


PENALTIES = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.3},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": -0.2, "presence_penalty": 0.5, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("penalties", PENALTIES)
async def test_penalties_are_about_all_of_the_sample_and_nothing_else(
    judged: tuple[Engine, Any, set[int]], penalties: dict[str, float]
) -> None:
    engine, model, ends = judged
    asked = request(max_new_tokens=60, ignore_eos=True, **penalties)
    whole = await engine.generate(asked)
    assert len(whole.token_ids) == 60
    check(model, asked, whole, ends)
    for cuts in ((1,), (20, 21), (7, 30)):
        legs = await in_legs(engine, asked, *cuts)
        check(model, asked, legs, ends)
        assert legs.token_ids.tolist() == whole.token_ids.tolist()


async def test_different_penalties_in_one_batch_start_and_end_at_different_times(
    judged: tuple[Engine, Any, set[int]],
) -> None:
    engine, model, ends = judged
    asked = [
        request(max_new_tokens=20 + 7 * i, ignore_eos=True, **penalties)
        for i, penalties in enumerate([*PENALTIES, {}, *PENALTIES, {}, {}, *PENALTIES])
    ]
    jobs = [in_legs(engine, one, *((5 + i,) if i % 2 else ())) for i, one in enumerate(asked)]
    for one, output in zip(asked, await asyncio.gather(*jobs), strict=True):
        check(model, one, output, ends)


@pytest.mark.parametrize("cuts", [(), (3,), (7,), (8,), (2, 9)])
@pytest.mark.parametrize("ignore_eos", [False, True])
async def test_nothing_that_would_end_it_comes_before_the_least_length(
    judged: tuple[Engine, Any, set[int]], cuts: tuple[int, ...], ignore_eos: bool
) -> None:
    engine, model, ends = judged
    favourites = {17: 30.0, **dict.fromkeys(ends, 30.0)}
    options: dict[str, Any] = {"logit_bias": favourites, "stop_token_ids": (17,), "ignore_eos": ignore_eos}
    at_once = await engine.generate(request(**options))
    if not (ignore_eos and ends):
        assert len(at_once.token_ids) == 1
    asked = request(min_new_tokens=8, presence_penalty=0.3, max_new_tokens=40, **options)
    output = await in_legs(engine, asked, *cuts)
    check(model, asked, output, set() if ignore_eos else ends)
    stops = {17} if ignore_eos else {17, *ends}
    assert not stops & set(output.token_ids[:8].tolist())
    if not (ignore_eos and ends):
        assert (len(output.token_ids), output.finish_reason) == (9, "stop")
        assert output.matched_stop in stops


async def test_with_and_without_a_least_length_in_one_batch(judged: tuple[Engine, Any, set[int]]) -> None:
    engine, model, ends = judged
    asked = [
        request(min_new_tokens=5 * (i % 4), max_new_tokens=30, logit_bias={17: 50.0}, stop_token_ids=(17,))
        for i in range(12)
    ]
    outputs = await asyncio.gather(*map(engine.generate, asked))
    assert [len(output.token_ids) for output in outputs] == [5 * (i % 4) + 1 for i in range(12)]
    for one, output in zip(asked, outputs, strict=True):
        check(model, one, output, ends)


async def test_the_least_length_may_be_the_greatest(text_engine: RemoteEngine, engine: SGLangEngine) -> None:
    for one in (text_engine, engine):
        output = await one.generate(request(min_new_tokens=6, max_new_tokens=6, logit_bias={17: 90.0, EOS: 90.0}))
        assert (len(output.token_ids), output.finish_reason) == (6, "length")


async def test_what_sglang_takes_back_and_computes_anew_keeps_penalties_lengths_and_stops(
    engine: SGLangEngine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    retractions, output = [], engine_module.engine_output

    def noted(request: Any, answer: Any, shapes: Any) -> Any:
        retractions.append(answer["meta_info"]["num_retractions"])
        return output(request, answer, shapes)

    monkeypatch.setattr(engine_module, "engine_output", noted)
    manager = engine._run.manager
    options: dict[str, Any] = {"logit_bias": {17: 90.0}, "max_new_tokens": 220, "min_new_tokens": 200}
    asked = [
        request(stop_token_sequences=((17,),), stop_token_ids=(17,), frequency_penalty=p, **options) for p in (0.1, 0.5)
    ]
    tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
    async with asyncio.timeout(60):
        while [len(s.output_ids) >= 50 for s in manager.rid_to_state.values()] != [True] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # between two looks
    await manager.pause_generation(sglang_request("PauseGenerationReqInput", mode="retract"))
    await manager.continue_generation(sglang_request("ContinueGenerationReqInput"))
    outputs = await asyncio.gather(*tasks)
    assert retractions == [1, 1]
    for one, output in zip(asked, outputs, strict=True):
        assert (len(output.token_ids), output.matched_stop) == (201, (17,))
        check(reference, one, output, set())
