"""Seeded sampling on SGLang's CPU path: the hash that draws, from published wheels.

SGLang draws a seeded token by a hash of seed, position and column. On a CPU that is an operator of `sgl_kernel`'s CPU
build, which is not published; this is the same function in torch. Bit for bit: the same seed draws alike on a GPU, as
far as the logits are the same. What makes those independent of the batch on a GPU has no counterpart on a CPU, where
they differ by rounding.

Imports SGLang: only for its scheduler process, after :func:`.cpu_support.prepare_engine`.
"""

from __future__ import annotations

import torch
from sglang.srt import batch_invariant_ops
from sglang.srt.layers import sampler

WORD = 0xFFFFFFFF


def install() -> None:
    """Into this process."""
    batch_invariant_ops.enable_batch_invariant_mode = lambda *_args, **_kwargs: None  # kernels in Triton
    if not hasattr(torch.ops.sgl_kernel, "murmur_hash32_cpu"):
        sampler.murmur_hash32 = murmur_hash32
        # Compiled otherwise, which takes longer at the start than it gives back here.
        drawn = sampler.multinomial_with_seed
        sampler.multinomial_with_seed = getattr(drawn, "_torchdynamo_orig_callable", drawn)


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """(n, m) uint32: MurmurHash3 of seed (n,) 64 bits, positions (n,) and col_indices (m,) 32 bits."""
    words = seed.view(torch.int64)
    state = torch.zeros_like(words)
    for block in (words & WORD, (words >> 32) & WORD, positions.long() & WORD):
        state = _mix(state, block)
    state = _mix(state[:, None], col_indices.long()[None, :] & WORD) ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & WORD
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    # Products of two 32-bit numbers can reach past 63 bits; their lower 32 bits are right all the same.
    block = _rotated((block * 0xCC9E2D51) & WORD, 15)
    block = (block * 0x1B873593) & WORD
    return (_rotated(state ^ block, 13) * 5 + 0xE6546B64) & WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & WORD
