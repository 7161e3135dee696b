"""Requests at the edge of what is allowed, and mixtures of them: the scheduler's process outlives each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engines.remote import RemoteEngine
from support.engines.text_requests import EOS, request

from rolloutmq.messages.model.sampling import MAX_BIAS, LogprobOptions
from rolloutmq.worker.engine.protocol import Wanted

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
PLAIN: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 30}


async def test_what_some_tell_the_sampler_and_others_the_scheduler_alone(text_engine: RemoteEngine) -> None:
    """In one prefill: requests for logprobs of the prompt after temperature, and such as have only a stop."""
    scaled = Wanted(logprobs=LogprobOptions(prompt=True, kind="scaled"))
    asked = [request(**PLAIN, ignore_eos=True, stop=("never this",)) for _ in range(6)]
    asked[1::2] = [replace(each, wanted=scaled) for each in asked[1::2]]
    outputs = await asyncio.gather(*map(text_engine.generate, asked))
    assert [len(output.token_ids) for output in outputs] == [30] * 6
    assert [output.arrays.keys() == {"prompt_logprobs"} for output in outputs] == [False, True] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1.1e-6, "repetition_penalty": 0.01, "logit_bias": {5: MAX_BIAS}},
        {"temperature": 100.0, "logit_bias": dict.fromkeys(range(320), -MAX_BIAS)},
        {"temperature": 1e-300, "frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"top_p": 1e-320, "min_p": 1.0, "top_k": 1},
    ],
)
async def test_the_most_that_is_allowed_leaves_a_distribution(
    text_engine: RemoteEngine, extreme: dict[str, Any]
) -> None:
    output = await text_engine.generate(request(**PLAIN | {"ignore_eos": True} | extreme))
    assert len(output.token_ids) == 30
    assert np.isfinite(output.logprobs).all()


async def test_no_bias_is_stronger_than_a_least_length(text_engine: RemoteEngine) -> None:
    output = await text_engine.generate(request(**PLAIN, min_new_tokens=20, logit_bias={EOS: MAX_BIAS}))
    assert (len(output.token_ids), output.matched_stop) == (21, EOS)
    assert EOS not in output.token_ids[:20]
