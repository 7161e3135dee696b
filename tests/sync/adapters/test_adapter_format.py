"""What a LoRA adapter must be, and how one sample says which of its versions sampled it."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from support.specimens.adapters import CONFIG, HEAD, RANK, lora, tensors

from rolloutmq import InvalidField
from rolloutmq.messages import Partial, Segment
from rolloutmq.sync.adapters.format import Adapter, check_config, check_tensors
from rolloutmq.worker.engine.loaded_adapters import LoadedAdapters
from rolloutmq.worker.engine.protocol import EngineOutput
from rolloutmq.worker.jobs.sample import SampleRun
from rolloutmq.worker.sglang.lora import complete


class _Kind(enum.Enum):
    LORA = "LORA"


def test_a_peft_configuration_becomes_plain_data() -> None:
    config = check_config(
        {"peft_type": _Kind.LORA, "r": 8, "lora_alpha": 16.0, "target_modules": {"v", "q"}, "x": None, "bias": "none"}
    )
    assert config["target_modules"] == ["q", "v"]
    assert config["peft_type"] == "LORA"
    assert config["x"] is None
    assert check_config({"r": 1, "lora_alpha": 1, "target_modules": "all-linear"})["peft_type"] == "LORA"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"r": 0}, "config.r"),
        ({"r": True}, "config.r"),
        ({"r": None}, "config.r"),
        ({"lora_alpha": float("inf")}, "config"),
        ({"lora_alpha": -1}, "config.lora_alpha"),
        ({"lora_alpha": "8"}, "config.lora_alpha"),
        ({"target_modules": []}, "config.target_modules"),
        ({"target_modules": ".*proj"}, "config.target_modules"),
        ({"target_modules": [1]}, "config.target_modules"),
        ({"peft_type": "IA3"}, "config.peft_type"),
        ({"use_dora": True}, "config.use_dora"),
        ({"use_rslora": True}, "config.use_rslora"),
        ({"alora_invocation_tokens": [5, 6]}, "config.alora_invocation_tokens"),
        ({"use_qalora": True}, "config.use_qalora"),
        ({"use_bdlora": {"nblocks": 2}}, "config.use_bdlora"),
        ({"arrow_config": {"top_k": 3}}, "config.arrow_config"),
        ({"kasa_config": {}}, "config.kasa_config"),
        ({"monteclora_config": {}}, "config.monteclora_config"),
        ({"rank_pattern": {"q_proj": 2}}, "config.rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "config.modules_to_save"),
        ({"bias": "all"}, "config.bias"),
        ({"note": object()}, "config"),
        ({"note": "x" * 70_000}, "config"),
    ],
)
def test_a_configuration_the_engine_would_not_follow_is_refused(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_config({**CONFIG, **change})
    assert refused.value.field == field


Q = f"{HEAD}.q_proj"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({f"{Q}.lora_A.weight": torch.zeros(RANK + 1, 32)}, "lora_A"),
        ({f"{Q}.lora_B.weight": torch.zeros(48, RANK - 1)}, "lora_B"),
        ({f"{Q}.lora_B.weight": torch.zeros(48)}, "lora_B"),
        ({f"{Q}.lora_B.weight": torch.zeros(48, RANK, dtype=torch.int8)}, "int8"),
        ({f"{Q}.lora_A.default.weight": torch.zeros(RANK, 32)}, "get_peft_model_state_dict"),
        ({f"{HEAD}.o_proj.lora_A.weight": torch.zeros(RANK, 32)}, "target_modules"),
        ({f"{HEAD}.xq_proj.lora_A.weight": torch.zeros(RANK, 32)}, "target_modules"),
        ({f"{Q}.weight": torch.zeros(48, 32)}, "lora_A.weight"),
        ({f"{Q}.lora_B.weight": None}, "both"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, "only modules that there are tensors of"),
        (dict.fromkeys(tensors(1)), "at least one module"),
    ],
)
def test_tensors_that_are_not_what_the_configuration_says(change: dict[str, Any], what: str) -> None:
    given = {name: tensor for name, tensor in {**tensors(1), **change}.items() if tensor is not None}
    with pytest.raises(InvalidField, match=what):
        check_tensors(CONFIG, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()})


def sample(loaded: LoadedAdapters, *pieces: Partial) -> SampleRun:
    made = SampleRun(lora(tokens=50), np.array([1, 2, 3], np.int32), 0, 1, 0.0, adapters=loaded)
    made.resume_from(list(pieces))
    return made


def piece(adapter: int, tokens: int = 10, start: int = 0) -> Partial:
    segments = (Segment(0, tokens),)
    return Partial(
        start=start,
        token_ids=[5] * tokens,
        logprobs=[-1.0] * tokens,
        segments=segments,
        adapter_segments=(Segment(adapter, tokens),),
    )


def having(*versions: int) -> LoadedAdapters:
    loaded = LoadedAdapters()
    for version in versions:
        loaded.add("math", version)
    return loaded


def run(one: SampleRun, tokens: int = 4) -> tuple[int, int]:
    """A leg of some tokens; the adapter version it had, and how many tokens its prompt had of the answer."""
    request = one.next_request(0)
    assert one.leg is not None
    assert request.cache_key == f"0/math@{request.adapter_version}"
    one.absorb(one.leg, EngineOutput(np.full(tokens, 7, np.int32), np.zeros(tokens, np.float32), "abort"), 0.1)
    return request.adapter_version, len(request.token_ids) - 3


@pytest.mark.parametrize(
    ("versions", "goes_on_with", "kept", "segments"),
    [
        ((2,), 2, 10, [Segment(2, 14)]),
        ((2, 3), 2, 10, [Segment(2, 14)]),
        ((3,), 3, 10, [Segment(2, 10), Segment(3, 4)]),
        ((1,), 1, 0, [Segment(1, 4)]),  # older than what it has: versions never decrease, so it starts over
        ((1, 3), 3, 10, [Segment(2, 10), Segment(3, 4)]),
    ],
)
def test_which_version_a_sample_goes_on_with(
    versions: tuple[int, ...], goes_on_with: int, kept: int, segments: list[Segment]
) -> None:
    one = sample(having(*versions), piece(2))
    assert run(one) == (goes_on_with, kept)
    assert one.adapter_segments == segments
    found = one.unsaved()
    start = found.partial.start
    assert start == kept
    assert found.partial.adapter_segments == (Segment(goes_on_with, 4),)
    assert run(one)[0] == goes_on_with


def test_a_version_in_use_is_not_superseded() -> None:
    loaded = having(1)
    one = sample(loaded)
    assert run(one) == (1, 0)
    loaded.add("math", 2)
    other = sample(loaded)
    assert run(other) == (2, 0)
    assert loaded.superseded() == []
    assert run(one) == (1, 4)  # between two legs, too
    del one
    assert loaded.superseded() == [("math", 1)]
    loaded.remove("math", 1)
    assert loaded.superseded() == []


MODEL = {
    f"model.layers.0.self_attn.{name}.weight": shape
    for name, shape in (("q_proj", (48, 32)), ("k_proj", (16, 32)), ("v_proj", (16, 32)), ("o_proj", (32, 48)))
}


def arrived(given: dict[str, torch.Tensor]) -> Adapter:
    return Adapter("math", 1, dict(CONFIG), given)


def test_what_sglang_fuses_is_made_complete() -> None:
    given = {name: tensor for name, tensor in tensors(1).items() if "v_proj" in name}
    whole = complete(arrived(given), MODEL)
    for name, rows in (("q_proj", 48), ("k_proj", 16)):
        a, b = whole[f"{HEAD}.{name}.lora_A.weight"], whole[f"{HEAD}.{name}.lora_B.weight"]
        assert (a.shape, b.shape) == ((RANK, 32), (rows, RANK))
        assert a.dtype == b.dtype == torch.bfloat16
        assert not a.any()
        assert not b.any()
    assert whole.keys() - given.keys() == {f"{HEAD}.{n}.lora_{s}.weight" for n in ("q_proj", "k_proj") for s in "AB"}
    lone = {name.replace("v_proj", "o_proj"): tensor for name, tensor in given.items()}
    assert complete(arrived(lone), {}) == lone


@pytest.mark.parametrize(
    ("given", "shapes", "what"),
    [
        (tensors(1), {**MODEL, "model.layers.0.self_attn.q_proj.weight": (64, 32)}, r"\(64, 32\).*\(48, 32\)"),
        (
            {name.replace("layers.0.self_attn.q", "layers.9.self_attn.q"): t for name, t in tensors(1).items()},
            MODEL,
            "9",
        ),
        (tensors(1), {}, "k_proj"),
    ],
)
def test_tensors_that_would_end_sglang_are_refused(given: Any, shapes: Any, what: str) -> None:
    with pytest.raises(InvalidField, match=what):
        complete(arrived(given), shapes)
