"""Models whose shapes alone matter: config.json for the engine, and a checkpoint's names and shapes for the trainer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolloutmq.messages.errors import ConfigError

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3 architecture.

    experts: 0 for a dense model. inner: width of the MLP, or of one expert. kv_tokens: size of the engine's KV cache,
    so that weights and staging buffers have the rest of the memory.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    experts: int = 0
    active: int = 0
    kv_tokens: int = 65536

    def config(self) -> dict[str, Any]:
        """Return the config.json of transformers."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": self.vocab - 1,
            "bos_token_id": self.vocab - 2,
        }
        if self.experts:
            config |= {
                "num_experts": self.experts,
                "num_experts_per_tok": self.active,
                "moe_intermediate_size": self.inner,
                "decoder_sparse_step": 1,
                "norm_topk_prob": True,
                "mlp_only_layers": [],
                "router_aux_loss_coef": 0.001,
                "output_router_logits": False,
            }
        return config

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the published checkpoint's tensors, all bfloat16, without a tied lm_head."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.self_attn.q_proj.weight", (query, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (key, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (key, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, query)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head_dim,)
            if self.experts:
                yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
            mlps = [f"{prefix}.mlp.experts.{expert}" for expert in range(self.experts)] or [f"{prefix}.mlp"]
            for mlp in mlps:
                yield f"{mlp}.gate_proj.weight", (self.inner, self.hidden)
                yield f"{mlp}.up_proj.weight", (self.inner, self.hidden)
                yield f"{mlp}.down_proj.weight", (self.hidden, self.inner)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(math.prod(shape) * BF16_BYTES for _, shape in self.tensors())

    def write(self, folder: Path) -> None:
        """Write the files of a model folder that `load_format="dummy"` needs."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1))


SHAPES = {
    shape.name: shape
    for shape in (
        # Small enough for two cores and gloo. It has many tensors for its bytes, as the 0.6B one has.
        Shape("tiny", 256, 768, 4, 4, 2, 64, 4096, tied=True, kv_tokens=32768),
        Shape("tiny-moe", 128, 64, 2, 4, 2, 32, 2048, tied=False, experts=8, active=2, kv_tokens=32768),
        Shape("0.6b", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),  # Qwen3-0.6B
        Shape("4b", 2560, 9728, 36, 32, 8, 128, 151936, tied=True),  # Qwen3-4B
        Shape("8b", 4096, 12288, 36, 32, 8, 128, 151936, tied=False),  # Qwen3-8B
        Shape(
            "moe", 2048, 768, 12, 32, 4, 128, 151936, tied=False, experts=128, active=8
        ),  # Qwen3-30B-A3B, 12 of 48 layers
    )
}


def one_shape(name: str) -> Shape:
    """Return a shape by name. Raises ConfigError for an unknown one."""
    if (shape := SHAPES.get(name)) is None:
        raise ConfigError(f"--shape {name!r}: one of {', '.join(SHAPES)}")
    return shape


def write_random(shape: Shape, folder: Path, device: str = "cpu") -> dict[str, Any]:
    """A checkpoint with random weights and a tokenizer of bytes. Returns the tensors, on the device."""
    import torch
    from safetensors.torch import save_file

    from rolloutmq.ops.tiny_model import write_tiny_model

    write_tiny_model(folder)
    shape.write(folder)
    random = torch.Generator(device).manual_seed(0)
    place: Any = {"device": device, "dtype": torch.bfloat16}
    tensors = {
        name: torch.randn(size, generator=random, **place) * 0.02 if len(size) > 1 else torch.ones(size, **place)
        for name, size in shape.tensors()
    }
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return tensors
