"""Digests of tensors, the same on every device.

A tensor's bytes are read as little-endian 32-bit words w_i (the last one padded with zeros); its digest is

    sum_i (w_i + 1) * k_i  mod 2^64,   k_i = (splitmix64(i mod C) | 1) * (2 * floor(i / C) + 1),   C = 2^22

a multilinear hash (Lemire and Kaser, "Strongly universal string hashing is fast", 2014) with keys that depend on the
position. Because every k_i is odd, a change of any single word always changes the digest; two swapped words or a
shifted slice change it but for a chance of about 2^-64. It guards against corruption and mix-ups, not against forgery:
the keys are public.
"""

from __future__ import annotations

from functools import lru_cache

import torch

CHUNK_WORDS = 1 << 22
"""Words hashed at a time: bounds the temporary memory to about 100 MB."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64; torch's own one copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=2)
def _keys(count: int, device: str) -> torch.Tensor:
    """k_0 … k_{count-1} as int64. splitmix64: Steele, Lea and Flood, 2014."""
    z = (torch.arange(count, dtype=torch.int64, device=device) + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return (z ^ _shift(z, 31)) | 1


def digest(tensor: torch.Tensor) -> str:
    """16 hex digits over the bytes of `tensor` in row-major order, computed on its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    tail = flat.numel() % 4
    if tail:
        flat = torch.cat([flat, flat.new_zeros(4 - tail)])
    if flat.storage_offset() % 4:
        flat = flat.clone()  # a slice of a packed buffer need not be aligned for 32-bit words
    words = flat.view(torch.int32)
    total = 0
    keys = _keys(min(CHUNK_WORDS, max(1, 1 << max(0, words.numel() - 1).bit_length())), str(words.device))
    for chunk, start in enumerate(range(0, words.numel(), CHUNK_WORDS)):
        part = words[start : start + CHUNK_WORDS].to(torch.int64) & 0xFFFFFFFF
        # Keys repeat every chunk; multiplying each chunk's sum by its own odd number keeps the chunks apart.
        value = int(((part + 1) * keys[: part.numel()]).sum().item())
        total += value * (2 * chunk + 1)
    return f"{total & 0xFFFFFFFFFFFFFFFF:016x}"
