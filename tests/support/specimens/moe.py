"""A mixture of experts small enough for a CPU, and which experts transformers sends tokens to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rolloutmq.worker.cpu_support import prepare_transformers

LAYERS, EXPERTS = 2, 2
"""Of the model; experts of a token, of eight."""


def write_experts(path: Path, seed: int, *, dtype: str = "float32") -> Path:
    """A checkpoint; each seed has weights of its own. 320 tokens in its vocabulary, none of which ends a sample."""
    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: PLC0415

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=EXPERTS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones: every tensor should tell two versions apart
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


def routes(model: Any, tokens: list[int]) -> Any:
    """(tokens, layers, k): the experts of each token, in ascending order."""
    return np.sort(_router_logits(model, tokens).topk(EXPERTS).indices.numpy(), -1)


def check_routes(found: Any, expected: Any, share: float = 0.995) -> None:
    """All but what a rounding error between two experts explains."""
    assert (found.dtype, found.shape) == (np.uint8, expected.shape)
    assert (np.sort(found, -1) == expected).mean() > share


def same_routes(found: Any, model: Any, tokens: list[int], start: int) -> Any:
    """(rows,) bool: the token of this row went to the experts that `model` sends it to in all layers, at every run.

    found: (rows, layers, k), of the tokens from `start` on. It is asserted that other experts than the model's were
    nearly as good ones: a rounding error can swap these, and then the row's logprobs are others too.
    """
    logits = _router_logits(model, tokens).numpy()[start : start + len(found)]
    ranked = np.sort(logits, -1)
    best, clear = ranked[..., -EXPERTS:], ranked[..., -EXPERTS] - ranked[..., -EXPERTS - 1] > 1e-5
    taken = np.sort(np.take_along_axis(logits, found.astype(int), -1), -1)
    np.testing.assert_allclose(taken, best, atol=1e-3)
    check_routes(found, routes(model, tokens)[start : start + len(found)])
    return (taken == best).all((1, 2)) & clear.all(1)


def _router_logits(model: Any, tokens: list[int]) -> Any:
    """(tokens, layers, experts)"""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack(logits, 1)
