"""One request in every dialect on real SGLang: the same tokens, log-probabilities and end, as transformers has them."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from support.engines.asking import judged

from rolloutmq import GenerateJob
from rolloutmq.messages.dialects.translate import Dialect, job_fields
from rolloutmq.messages.model.sampling import LogprobOptions
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Wanted
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = [11, 23, 5, 301, 42, 7]
FORCED, TOKENS = 77, 12
_ids = count(1)

ASKED: dict[Dialect, dict[str, Any]] = {
    "sglang": {
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0, "top_k": 1 << 30, "logit_bias": {"77": 50.0}},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "token_ids_logprob": [3, 9],
    },
    "vllm": {
        "max_tokens": TOKENS,
        "temperature": 0.0,
        "top_k": 0,
        "logit_bias": {77: 50.0},
        "logprobs": 2,
        "logprob_token_ids": [3, 9],
    },
    "skyrl": {
        "max_generate_length": TOKENS,
        "temperature": 0.0,
        "top_k": -1,
        "logprobs": 2,
        "stop": None,
        "additional_kwargs": {"logit_bias": {"77": 50.0}, "logprob_token_ids": [3, 9]},
    },
    "verl": {
        "response_length": TOKENS,
        "temperature": 0.9,
        "do_sample": False,
        "top_k": -1,
        "top_p": 1,
        "logprobs": True,
        "sampling_kwargs": {"logit_bias": {77: 50}, "top_logprobs": 2, "logprob_token_ids": [3, 9]},
    },
    "openai": {
        "max_completion_tokens": TOKENS,
        "temperature": 0,
        "logit_bias": {"77": 50},
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"logprob_token_ids": [3, 9]},
    },
}


async def run(engine: SGLangEngine, params: dict[str, Any], dialect: Dialect) -> EngineOutput:
    job = GenerateJob.build(token_ids=PROMPT, **job_fields(params, dialect))
    wanted = Wanted(logprobs=job.logprobs, logit_processors=job.logit_processors)
    tokens = np.array(PROMPT, np.int32)
    request = EngineRequest(
        f"{next(_ids):044x}", tokens, job.sampling, job.sampling.max_new_tokens, "dialects", wanted=wanted
    )
    return await engine.generate(request)


@pytest.mark.parametrize("dialect", ASKED)
async def test_the_same_request_gives_the_same_sample(engine: SGLangEngine, reference: Any, dialect: Dialect) -> None:
    output = await run(engine, ASKED[dialect], dialect)
    assert output.token_ids.tolist() == [FORCED] * TOKENS  # greedy, and the bias is stronger than the model
    rows = judged(reference, PROMPT + [FORCED] * TOKENS)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(output.token_arrays["id_logprobs"], rows_with_bias(rows)[:, [3, 9]], atol=2e-3)
    assert output.token_arrays["top_ids"].shape == (TOKENS, 2)
    assert (output.token_arrays["top_ids"][:, 0] == FORCED).all()
    assert job_fields(ASKED[dialect], dialect)["logprobs"] == LogprobOptions(top=2, token_ids=(3, 9))


async def test_tokens_that_are_allowed_and_a_stop_in_vllms_words(engine: SGLangEngine) -> None:
    output = await run(engine, {"max_tokens": 40, "allowed_token_ids": [50, 60, 70], "seed": None}, "vllm")
    assert len(output.token_ids) == 40
    assert set(output.token_ids.tolist()) <= {50, 60, 70}
    stopped = await run(engine, {"max_tokens": 40, "logit_bias": {"77": 50}, "stop_token_ids": [77]}, "vllm")
    assert stopped.token_ids.tolist() == [FORCED]
    assert stopped.matched_stop == FORCED


def rows_with_bias(rows: np.ndarray) -> np.ndarray:
    """Log-probabilities after 50 were added to the forced token's logit."""
    biased = rows.copy()
    biased[:, FORCED] += 50.0
    peak = biased.max(-1, keepdims=True)
    return biased - peak - np.log(np.exp(biased - peak).sum(-1, keepdims=True))
