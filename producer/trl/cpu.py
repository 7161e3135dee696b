"""AsyncGRPOTrainer on a host without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


def flash_attn_varlen_func(  # noqa: PLR0917 – the kernel's
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_q: torch.Tensor,
    starts_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    **unknown: Any,
) -> torch.Tensor:
    """The one function of the FlashAttention kernel that TRL calls: attention of segments that lie end to end.

    query: (q, heads, d); key, value: (k, key heads, d). Segment i has queries starts_q[i] to starts_q[i + 1] and
    keys likewise; its last query sees all of its keys. Returns (q, heads, d).
    """
    if unknown or window_size != (-1, -1) or not causal:
        raise NotImplementedError("on a CPU, packed rows have no sliding window and no soft cap")
    out = torch.empty_like(query)
    places = zip(starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:], strict=True)
    for first_q, end_q, first_k, end_k in torch.tensor([[int(at) for at in place] for place in places]).tolist():
        q, k, v = (rows.transpose(0, 1) for rows in (query[first_q:end_q], key[first_k:end_k], value[first_k:end_k]))
        seen = torch.ones(end_q - first_q, end_k - first_k, dtype=torch.bool).tril(end_k - first_k - end_q + first_q)
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        out[first_q:end_q] = found.transpose(0, 1)
    return out


def prepare_cpu() -> None:
    """Let AsyncGRPOTrainer run where torch sees no GPU; does nothing where it sees one.

    Call it before the trainer is made. TRL 1.16 takes two things for granted that only GPUs have: a FlashAttention
    kernel for its packed rows, and a device name to look up the peak FLOPs of. Both are replaced in this process: the
    kernel by plain torch, which is slow and meant for trials, and the peak FLOPs by None, so no utilisation is
    logged.
    """
    if torch.cuda.is_available():
        return
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_args: None
