"""A dense Megatron-Core model under the names of its Hugging Face checkpoint, for `WeightPublisher.publish`.

For Llama, Mistral, Qwen2 and Qwen3 cut by tensor parallelism. docs/trainers.md says what else there is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",  # with Transformer Engine
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",  # with Transformer Engine
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Names inside a layer, or of the whole model, of tensors that only have to be put together."""


def hf_weights(model: Any, vocab_size: int, group: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a GPTModel. Every rank of its tensor-parallel group iterates over all of it.

    vocab_size: the checkpoint's; Megatron pads it. group: get_tensor_model_parallel_group(). None: all ranks are in it.
    """
    if not (model.pre_process and model.post_process):
        raise ValueError("a stage of a pipeline numbers its layers from 0: use a bridge")
    for name, parameter in model.named_parameters():
        cut = getattr(parameter, "tensor_model_parallel", False)
        shards = [torch.empty_like(parameter) for _ in range(dist.get_world_size(group))] if cut else [parameter.data]
        if cut:
            dist.all_gather(shards, parameter.data.contiguous(), group=group)
        dim = getattr(parameter, "partition_dim", 0) if cut else 0
        yield from whole(name.removeprefix("module."), shards, dim, model.config, vocab_size)


def whole(
    name: str, shards: Sequence[torch.Tensor], dim: int, config: Any, vocab_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the checkpoint's tensors that are in one of Megatron's. shards: by rank, cut along `dim`."""
    layer, number, inside = "", "", name
    if name.startswith("decoder.layers."):
        number, _, inside = name.removeprefix("decoder.layers.").partition(".")
        layer = f"model.layers.{number}."
    if inside.startswith("self_attention.linear_qkv.") and not inside.endswith("layer_norm_weight"):
        # One group after the other, and in each its queries, its key, its value. A rank has whole groups.
        joined, kind = torch.cat(list(shards)), inside.rpartition(".")[2]
        grouped = joined.unflatten(0, (config.num_query_groups, -1, config.kv_channels))
        for part, piece in zip("qkv", grouped.split([grouped.shape[1] - 2, 1, 1], 1)):
            yield f"{layer}self_attn.{part}_proj.{kind}", piece.flatten(0, 2)
    elif inside == "mlp.linear_fc1.weight":  # each rank has its rows of gate, then its rows of up
        for part, pieces in zip(("gate", "up"), zip(*(shard.chunk(2) for shard in shards))):
            yield f"{layer}mlp.{part}_proj.weight", torch.cat(pieces)
    elif inside in NAMES:
        joined = torch.cat(list(shards), dim) if len(shards) > 1 else shards[0]
        padded = inside in {"embedding.word_embeddings.weight", "output_layer.weight"}
        yield layer + NAMES[inside], joined[:vocab_size] if padded else joined
    else:
        raise ValueError(f"{name}: not a tensor of a dense model without biases; use a bridge")
