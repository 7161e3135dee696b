"""A request in SGLang's form."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.model import Medium
from rolloutmq.messages.model.sampling import LogitProcessor, LogprobOptions, SamplingParams
from rolloutmq.worker.engine.protocol import NOTHING_MORE, EngineRequest, Wanted
from rolloutmq.worker.sglang.calls.request import generate_arguments

MASK = LogitProcessor(name="action_mask", params={"token_ids": [1]})


def arguments(wanted: Wanted = NOTHING_MORE, *, deterministic: bool = False, **more: Any) -> dict[str, Any]:
    sampling = SamplingParams(**more.pop("sampling", {}))
    request = EngineRequest("r", np.array([5, 6, 7], np.int32), sampling, 9, "key", wanted=wanted, **more)
    return generate_arguments(request, marker=lambda: "told", deterministic=deterministic)


def test_who_asks_for_nothing_carries_nothing() -> None:
    assert arguments() == {
        "rid": "r",
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "priority": 0,
        "extra_key": "key",
        "lora_path": None,
    }


def test_what_is_wanted_is_asked_for() -> None:
    options = LogprobOptions(top=3, token_ids=(4, 2), prompt=True)
    wanted = Wanted(logprobs=options, hidden_states="all", routed_experts=True)
    first, later = (
        arguments(wanted),
        arguments(Wanted(logprobs=options, routed_experts=True, prompt=False), generated=2),
    )
    assert (first["top_logprobs_num"], first["token_ids_logprob"], first["logprob_start_len"]) == (3, [4, 2], 0)
    assert (first["return_hidden_states"], first["routed_experts_start_len"]) == ("last", 0)
    assert (later["logprob_start_len"], later["routed_experts_start_len"]) == (-1, 2)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(logit_processors=(MASK,)), {"processors": [["action_mask", {"token_ids": [1]}]]}),
        (Wanted(logprobs=LogprobOptions(kind="scaled")), {"scaled": True}),
        (Wanted(hidden_states="all"), {"all_states": True}),
    ],
)
def test_what_the_scheduler_is_told(wanted: Wanted, told: dict[str, Any]) -> None:
    found = arguments(wanted, generated=2)
    [text] = found["sampling_params"]["custom_params"].values()
    assert json.loads(text) == {**told, "generated": 2}
    assert found["custom_logit_processor"] == "told"


def test_media_go_as_bytes_by_kind() -> None:
    media = [Medium(kind=kind, data=kind.encode()) for kind in ("image", "audio", "video", "image")]
    found = arguments(media=tuple(media))
    data = {name: found[name] for name in ("image_data", "audio_data", "video_data")}
    assert data == {"image_data": [b"image"] * 2, "audio_data": [b"audio"], "video_data": [b"video"]}


def test_greedy_sampling_has_no_logprobs_after_temperature() -> None:
    assert arguments(Wanted(logprobs=LogprobOptions(kind="scaled")), sampling={"temperature": 0.0}) == arguments(
        Wanted(), sampling={"temperature": 0.0}
    )


def test_seeds_are_for_deterministic_engines_where_everybody_has_one() -> None:
    assert "sampling_seed" not in arguments(Wanted(seed=3))["sampling_params"]
    assert arguments(Wanted(seed=3), deterministic=True)["sampling_params"]["sampling_seed"] == 3
    free = [arguments(deterministic=True)["sampling_params"]["sampling_seed"] for _ in range(3)]
    assert len(set(free)) == 3
    assert all(0 <= seed < 2**63 for seed in free)
