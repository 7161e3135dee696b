"""What SGLang answers, as this package has it: cases that a real engine shows only by chance."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.errors import EngineError, RequestRefused
from rolloutmq.messages.model.sampling import LogitProcessor, SamplingParams
from rolloutmq.worker.engine.protocol import EngineRequest, Wanted
from rolloutmq.worker.sglang.calls.answer import LOGPROBS, Shapes, check_sizes, engine_output

SHAPES = Shapes(hidden=4, dtype="float16", layers=2, experts=3)
STATES = np.arange(12.0).reshape(3, 4).tolist()


def answered(
    wanted: Wanted,
    shapes: Shapes = SHAPES,
    *,
    reason: str = "length",
    logprobs: tuple[float, ...] = (-1.0, -2.0, -3.0),
    **meta: Any,
) -> Any:
    """The output of three tokens after a prompt of four, one of which an earlier leg generated."""
    request = EngineRequest("r", np.arange(4, dtype=np.int32), SamplingParams(), 3, "0", generated=1, wanted=wanted)
    meta |= {"finish_reason": {"type": reason}, LOGPROBS: list(logprobs)}
    return engine_output(request, {"output_ids": [5, 6, 7], "meta_info": meta}, shapes)


def test_hidden_states_are_there_or_it_is_an_error() -> None:
    output = answered(Wanted(hidden_states="all"), hidden_states=STATES)
    assert output.token_arrays["hidden_states"].dtype == np.float16
    assert output.token_arrays["hidden_states"].tolist() == STATES
    assert (
        answered(Wanted(hidden_states="last"), hidden_states=STATES[2]).arrays["last_hidden_state"].tolist()
        == STATES[2]
    )
    for missing in ({}, {"hidden_states": STATES[:2]}):
        with pytest.raises(EngineError, match="hidden states of 3 tokens"):
            answered(Wanted(hidden_states="all"), **missing)


def test_an_aborted_request_without_its_rows_has_no_tokens() -> None:
    """SGLang had taken it back, and forgets them."""
    for wanted in (Wanted(hidden_states="all"), Wanted(routed_experts=True)):
        output = answered(wanted, reason="abort")
        assert (output.finish_reason, output.token_ids.size, output.logprobs.size) == ("abort", 0, 0)
        assert output.token_arrays == output.arrays == {}


def test_routed_experts_of_the_prompt_and_of_the_passes_that_sampled() -> None:
    table = np.arange(36, dtype=np.int32).reshape(6, 2, 3)  # of all but the last of 4 + 3 tokens
    told = base64.b64encode(table.tobytes()).decode()
    output = answered(Wanted(routed_experts=True), routed_experts=told)
    assert output.token_arrays["routed_experts"].tolist() == table[3:].tolist()
    assert output.arrays["prompt_routed_experts"].tolist() == table[:3].tolist()
    later = answered(
        Wanted(routed_experts=True, prompt=False), routed_experts=base64.b64encode(table[3:].tobytes()).decode()
    )
    assert later.token_arrays["routed_experts"].tolist() == table[3:].tolist()
    assert later.arrays == {}


@pytest.mark.parametrize(("among", "dtype"), [(128, "uint8"), (256, "uint8"), (257, "uint16"), (0, "int32")])
def test_experts_travel_as_the_smallest_numbers_that_the_models_fit(among: int, dtype: str) -> None:
    table = np.full((6, 2, 3), max(among - 1, 0), np.int32)
    output = answered(Wanted(routed_experts=True), replace(SHAPES, among=among), routed_experts=table)
    for found in (output.token_arrays["routed_experts"], output.arrays["prompt_routed_experts"]):
        assert (found.dtype, found.tolist()) == (dtype, table[3:].tolist())


@pytest.mark.parametrize("strange", [-1, 256])
def test_a_number_that_no_expert_should_have_does_not_become_that_of_another(strange: int) -> None:
    table = np.full((6, 2, 3), strange)
    output = answered(Wanted(routed_experts=True), replace(SHAPES, among=256), routed_experts=table)
    assert output.token_arrays["routed_experts"].tolist() == table[3:].tolist()


def test_the_experts_of_64k_tokens_fit_where_a_number_is_one_byte() -> None:
    sampling, wanted = SamplingParams(max_new_tokens=1 << 16), Wanted(routed_experts=True)
    request = EngineRequest("r", np.arange(4, dtype=np.int32), sampling, 1 << 16, "0", wanted=wanted)
    check_sizes(request, Shapes(layers=48, experts=8, among=128))
    with pytest.raises(RequestRefused, match="routed_experts: 1536 bytes for each of up to 65540 tokens"):
        check_sizes(request, Shapes(layers=48, experts=8))


def test_what_does_not_fit_together_is_refused_before_anything_is_generated() -> None:
    sampling, wanted = SamplingParams(max_new_tokens=5000), Wanted(routed_experts=True, hidden_states="all")
    request = EngineRequest("r", np.arange(4, dtype=np.int32), sampling, 5000, "0", wanted=wanted)
    shapes = Shapes(hidden=4096, dtype="bfloat16", layers=48, experts=8, among=128)
    check_sizes(request, shapes)
    request = replace(request, sampling=SamplingParams(max_new_tokens=6000))
    with pytest.raises(RequestRefused, match="hidden_states: 8192 bytes for each of up to 6000 tokens, routed_experts"):
        check_sizes(request, shapes)


def test_a_token_that_had_no_distribution_fails_the_job() -> None:
    wanted = Wanted(logit_processors=(LogitProcessor(name="mine"),))
    with pytest.raises(RequestRefused, match=r"logit_processors \(mine\): failed, or left no token .*, at token 1"):
        answered(wanted, logprobs=(-1.0, float("nan"), -3.0))
