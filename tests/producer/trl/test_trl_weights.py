"""PoolWeightTransfer without workers: what is published under which numbers, and what it refuses."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.lazily import Lazily

from rolloutmq import WeightPublisher
from rolloutmq.messages.errors import InvalidField, WeightSyncError

made, peft = Lazily("support.trainers.trl"), Lazily("peft")
turns, base = Lazily("rolloutmq.producer.trl.turns"), Lazily("rolloutmq.producer.trl.weights")


@pytest.fixture
def peft_model(tiny: Path) -> Any:
    model = made.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )


def pairs(value: float = 1.0) -> Any:
    return iter([("weight", torch.full((4,), value))])


def test_versions_are_above_the_pools_and_above_the_trainers_own(redis_db: str) -> None:
    with WeightPublisher(redis_db) as other:
        other.publish(7, pairs()).wait()
    weights = made.PoolWeightTransfer(redis_db)
    weights.init_weight_transfer()
    weights.send_weights(pairs())
    assert (weights.first_version, weights.version) == (8, 8)
    weights.send_weights(pairs())
    assert (weights.first_version, weights.version) == (8, 9)
    weights.destroy()
    with pytest.raises(WeightSyncError, match="not open"):
        weights.send_weights(pairs())
    restored = made.PoolWeightTransfer(redis_db)
    restored.above = 20
    restored.init_weight_transfer()
    restored.send_weights(pairs())
    assert restored.version == 21
    restored.destroy()


def test_weights_that_are_no_numbers_end_training(redis_db: str) -> None:
    weights = made.PoolWeightTransfer(redis_db)
    weights.init_weight_transfer()
    with pytest.raises(WeightSyncError, match="NaN"):
        weights.send_weights(pairs(float("nan")))
    weights.destroy()


def test_an_adapter_travels_alone_after_its_base(redis_db: str, peft_model: Any) -> None:
    weights = made.PoolWeightTransfer(redis_db, adapter="policy")
    weights.init_weight_transfer()
    with pytest.raises(InvalidField, match="adapter"):
        weights.send_weights(pairs())
    weights.model = SimpleNamespace(module=peft_model)  # as DistributedDataParallel wraps it
    weights.send_weights(pairs())
    weights.send_weights(pairs())
    assert (weights.first_version, weights.version) == (1, 2)
    weights.destroy()
    with WeightPublisher(redis_db) as after:
        assert (after.last_version, after.last_adapter_version("policy")) == (1, 2)


def test_a_base_is_without_its_adapter_and_under_the_checkpoints_names(tiny: Path, peft_model: Any) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    stored = load_file(tiny / "model.safetensors")
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    peft_model.merge_adapter()  # as TRL does around `send_weights`
    found = {name: tensor.clone() for name, tensor in base.base_weights(peft_model)}
    assert set(found) == set(stored) - {"lm_head.weight"}
    assert all(torch.allclose(tensor, stored[name].float(), atol=1e-5) for name, tensor in found.items())


def test_segments_attend_to_their_own_keys() -> None:
    """The stand-in for the kernel, against attention of each segment by itself."""
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    starts_q, starts_k = torch.tensor([0, 3, 5]), torch.tensor([0, 3, 7])
    found = importlib.import_module("rolloutmq.producer.trl.cpu").flash_attn_varlen_func(
        query, key, value, starts_q, starts_k, 3, 4, softmax_scale=0.5, causal=True, window_size=(-1, -1)
    )
    for at, (first, k0, upto) in {0: (0, 0, 1), 2: (2, 0, 3), 3: (3, 3, 6), 4: (4, 3, 7)}.items():
        for head in range(4):
            scores = (key[k0:upto, head // 2] @ query[first, head]) * 0.5
            expected = torch.softmax(scores, 0) @ value[k0:upto, head // 2]
            assert torch.allclose(found[at, head], expected, atol=1e-5)


def test_settings_of_generation_become_fields_of_a_job() -> None:
    args = SimpleNamespace(
        max_completion_length=7, temperature=0.7, top_p=0.9, top_k=0, min_p=None, repetition_penalty=1.1,
        generation_kwargs={"frequency_penalty": 0.5},
    )  # fmt: skip
    fields = turns.sampling_of(args, [3, 4])
    assert fields["logprobs"] == {"kind": "scaled"}
    assert fields["sampling"] == {
        "max_new_tokens": 7, "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.1,
        "stop_token_ids": (3, 4), "frequency_penalty": 0.5,
    }  # fmt: skip
    args.generation_kwargs = {"n": 3}
    with pytest.raises(InvalidField, match="generation_kwargs"):
        turns.sampling_of(args, [])


@pytest.mark.parametrize("installed", [None, "1.15.2"])
def test_whoever_has_no_trl_is_told_what_to_install(installed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ImportError, match=r"pip install 'rolloutmq\[trl\]'"):
        importlib.reload(importlib.import_module("rolloutmq.producer.trl"))
