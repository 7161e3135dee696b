"""Mixture-of-experts models leave the trainer under the names, and with the bits, that save_pretrained writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from rolloutmq.messages import InvalidField
from rolloutmq.sync.packing.experts import CHECKPOINT_NAMES, unfuse_experts
from rolloutmq.sync.packing.gather import strip_wrappers
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.worker.cpu_support import prepare_transformers

GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **LATENT},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "minimax_m2": {"num_local_experts": 4},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "qwen2_moe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1]},
    "qwen3_next": {"num_experts": 4},
}


def tiny(model_type: str) -> Any:
    """A model with random weights, every tensor different from every other."""
    prepare_transformers()
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | MORE[model_type])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def layer() -> dict[str, torch.Tensor]:
    """A fused layer: 3 experts, inner 4, hidden 5."""
    return {GATE_UP: torch.randn(3, 8, 5), DOWN: torch.randn(3, 5, 4)}


@pytest.mark.parametrize("model_type", sorted(CHECKPOINT_NAMES))
def test_names_and_bits_are_the_checkpoints(model_type: str, tmp_path: Path) -> None:
    model = tiny(model_type)
    fused = {name for name, tensor in model.named_parameters() if ".experts." in name and tensor.ndim == 3}
    assert fused  # else this version of transformers has nothing to take apart
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    sent = dict(unfuse_experts(model.state_dict(), model_type))
    assert sent.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(sent[name], tensor), name


def test_they_are_views_and_publish_takes_them() -> None:
    model = tiny("qwen3_moe")
    parameters = dict(model.named_parameters())
    sent = list(unfuse_experts(parameters.items(), "qwen3_moe"))
    storages = {tensor.untyped_storage().data_ptr() for tensor in parameters.values()}
    assert {tensor.untyped_storage().data_ptr() for _, tensor in sent} == storages
    # The parameters themselves, in training as they are.
    packed = PackedWeights(1, unfuse_experts(model.named_parameters(), "qwen3_moe")).snapshot()
    with torch.no_grad():
        for (name, copy), (given, tensor) in zip(packed.tensors(), sent, strict=True):
            assert (name, copy.shape) == (given, tensor.shape)
            assert torch.equal(copy, tensor), name


def test_wrappers_names_stay_for_rename_to_undo() -> None:
    tensors = {
        "_orig_mod." + name.replace("experts", "experts._checkpoint_wrapped_module"): tensor
        for name, tensor in layer().items()
    }
    sent = {strip_wrappers(name) for name, _ in unfuse_experts(tensors, "qwen3_moe")}
    assert sent == {name for name, _ in unfuse_experts(layer(), "qwen3_moe")}


def test_experts_that_are_apart_already_pass_through() -> None:
    apart = dict(unfuse_experts(layer(), "qwen3_moe")) | {"lm_head.weight": torch.ones(1), "scale": torch.ones(1)}
    again = dict(unfuse_experts(apart, "qwen3_moe"))
    assert list(again) == list(apart)
    assert all(again[name] is apart[name] for name in apart)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


def test_only_fused_dtensors_are_gathered_once_each_and_in_order(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathers are collectives: one left out, or two in another order, and a trainer's ranks wait for each other."""
    whole = {"a.weight": torch.randn(4), **layer(), "b.weight": torch.randn(4)}
    sharded = {name: DTensor.from_local(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    gathers: list[tuple[int, ...]] = []
    original = DTensor.full_tensor

    def full_tensor(tensor: DTensor, **how: Any) -> torch.Tensor:
        gathers.append(tuple(tensor.shape))
        return original(tensor, **how)

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    sent = dict(unfuse_experts(sharded, "qwen3_moe"))
    assert gathers == [(3, 8, 5), (3, 5, 4)]
    assert [name for name, tensor in sent.items() if isinstance(tensor, DTensor)] == ["a.weight", "b.weight"]
    packed = PackedWeights(1, unfuse_experts(sharded, "qwen3_moe"))
    assert gathers[2:] == [(4,), (3, 8, 5), (3, 5, 4), (4,)]
    expected = PackedWeights(1, unfuse_experts(whole, "qwen3_moe"))
    assert packed.snapshot().manifest.tensors == expected.snapshot().manifest.tensors


def test_a_fused_tensor_is_let_go_before_the_next_one_is_made(mesh: DeviceMesh) -> None:
    made: list[StorageWeakRef] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            assert all(storage.expired() for storage in made)
            tensor = torch.randn(3, 8, 5)
            made.append(StorageWeakRef(tensor.untyped_storage()))
            yield f"model.layers.{number}.mlp.experts.gate_up_proj", tensor
            del tensor

    for _, tensor in unfuse_experts(stream(), "qwen3_moe"):
        del tensor
    assert len(made) == 3


@pytest.mark.parametrize("model_type", ["", "gpt_oss", "qwen3_vl_moe"])
def test_a_model_type_that_is_not_known_is_refused_at_once(model_type: str) -> None:
    """Those two keep experts fused on disk too: one with gate and up interleaved, one turned over."""
    with pytest.raises(InvalidField, match=f"model_type='{model_type}': one of .*qwen3_moe"):
        unfuse_experts(layer(), model_type)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({GATE_UP: torch.ones(3, 5, 8), DOWN: torch.ones(3, 4, 5)}, "gate_up_proj.*2 . inner"),  # turned over
        ({GATE_UP: torch.ones(3, 6, 8), DOWN: torch.ones(3, 3, 8)}, "down_proj.*3, 3 and 8"),
        ({DOWN: torch.ones(2, 5, 4)}, r"down_proj.*\(2, 5, 4\)"),
        ({GATE_UP: torch.ones(8, 5)}, r"gate_up_proj.*\(8, 5\)"),
        ({GATE_UP + "_bias": torch.ones(3, 8)}, "gate_up_proj_bias"),
    ],
    ids=["turned", "turned-even", "experts", "flat", "bias"],
)
def test_another_layout_is_refused_by_name(damage: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(InvalidField, match=named):
        list(unfuse_experts(layer() | damage, "qwen3_moe"))
