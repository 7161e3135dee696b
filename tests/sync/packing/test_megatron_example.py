"""The recipe for Megatron-Core's weights, on tensors that are cut as Megatron cuts them. It need not be installed.

tests/packages/test_megatron_package.py runs Megatron-Core itself; SEEN is what was found there.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

whole = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "megatron_weights.py"))["whole"]
LOCAL = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
FUSED = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
"""Where norms are without Transformer Engine, and with it."""
LAYER = "decoder.layers.1."
SEEN = {
    "embedding.word_embeddings.weight": (160, 64),
    LAYER + "input_layernorm.weight": (64,),
    LAYER + "self_attention.linear_proj.weight": (64, 32),
    LAYER + "self_attention.linear_qkv.weight": (64, 64),
    LAYER + "self_attention.q_layernorm.weight": (16,),
    LAYER + "self_attention.k_layernorm.weight": (16,),
    LAYER + "pre_mlp_layernorm.weight": (64,),
    LAYER + "mlp.linear_fc1.weight": (128, 64),
    LAYER + "mlp.linear_fc2.weight": (64, 64),
    "decoder.final_layernorm.weight": (64,),
    "output_layer.weight": (160, 64),
}
"""Rank 0 of 2, Megatron-Core 0.16.1: 2 layers, 4 heads of 16 in 2 groups, hidden 64, inner 128, 320 padded tokens."""


def tiny(**changes: Any) -> Any:
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": False}
    return transformers.Qwen3Config(**shape | heads | changes)


def cut(model: Any, ranks: int, padded: int, norms: tuple[str, str]) -> Iterator[tuple[str, list[torch.Tensor], int]]:
    """Name, shards by rank, and the dimension, of each tensor of a Megatron-Core model with the same weights."""
    config, state = model.config, model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.cat([state[name], state[name].new_zeros(padded - config.vocab_size, config.hidden_size)])
        yield {"l": "output_layer", "m": "embedding.word_embeddings"}[name[0]] + ".weight", [*rows.chunk(ranks)], 0
    yield "decoder.final_layernorm.weight", [state["model.norm.weight"]], 0
    for number in range(config.num_hidden_layers):
        own, prefix = f"model.layers.{number}.", f"decoder.layers.{number}."
        q, k, v = (state[f"{own}self_attn.{part}_proj.weight"].split(config.head_dim) for part in "qkv")
        each = len(q) // len(k)
        groups = [torch.cat([*q[g * each : (g + 1) * each], k[g], v[g]]) for g in range(len(k))]
        yield prefix + "self_attention.linear_qkv.weight", [*torch.cat(groups).chunk(ranks)], 0
        gate, up = (state[f"{own}mlp.{part}_proj.weight"].chunk(ranks) for part in ("gate", "up"))
        yield prefix + "mlp.linear_fc1.weight", [torch.cat(pair) for pair in zip(gate, up, strict=True)], 0
        for theirs, ours in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")):
            yield f"{prefix}{theirs}.weight", [*state[f"{own}{ours}.weight"].chunk(ranks, 1)], 1
        for theirs, ours in zip(norms, ("input_layernorm", "post_attention_layernorm"), strict=True):
            yield prefix + theirs, [state[f"{own}{ours}.weight"]], 0
        for part in "qk":
            name = f"self_attention.{part}_layernorm.weight"
            yield prefix + name, [state[f"{own}self_attn.{part}_norm.weight"]], 0


def converted(model: Any, ranks: int, padded: int, norms: tuple[str, str]) -> dict[str, torch.Tensor]:
    config = SimpleNamespace(num_query_groups=model.config.num_key_value_heads, kv_channels=model.config.head_dim)
    pairs = [
        pair
        for name, shards, dim in cut(model, ranks, padded, norms)
        for pair in whole(name, shards, dim, config, model.config.vocab_size)
    ]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("norms", [LOCAL, FUSED])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_bit_is_back_under_the_checkpoints_name(ranks: int, norms: tuple[str, str]) -> None:
    torch.manual_seed(ranks)
    model = transformers.Qwen3ForCausalLM(tiny(num_attention_heads=8, num_key_value_heads=4))
    for parameter in model.parameters():
        parameter.data.normal_()
    found = converted(model, ranks, 320, norms)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not found[name].equal(tensor)] == []


def test_the_cut_is_megatrons() -> None:
    model = transformers.Qwen3ForCausalLM(tiny())
    shapes = {name: tuple(shards[0].shape) for name, shards, _ in cut(model, 2, 320, LOCAL)}
    assert {name: shape for name, shape in shapes.items() if not name.startswith("decoder.layers.0.")} == SEEN


def test_a_large_model_has_all_its_bytes() -> None:
    """Qwen3-32B over eight ranks, as shapes alone."""
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(
            tiny(num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, **heads)
        ).to(torch.bfloat16)
    found = converted(model, 8, 152576, FUSED)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()
    }
    assert sum(tensor.nbytes for tensor in found.values()) == 65_524_246_528


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.linear_fc2.bias"])
def test_what_it_does_not_know_it_refuses(name: str) -> None:
    with pytest.raises(ValueError, match="use a bridge"):
        list(whole(name, [torch.zeros(4)], 0, None, 4))
