"""Keys of the digests, and which dtypes have NaN and Inf counted. digester.py has the definition they belong to."""

from __future__ import annotations

from functools import lru_cache

import torch

CHUNK_WORDS = 2048
"""C in the definition. The keys of so many words take 16 KB and fit into a first-level cache."""
LENGTH_KEY = 0x9E3779B97F4A7C15 - (1 << 64)
"""L in the definition, as int64: 2^64 divided by the golden ratio."""
MIX_FIRST, MIX_SECOND = 0x2C1B3C6D, 0x297A2D39
LOWBIAS_FIRST, LOWBIAS_SECOND = 0x7FEB352D, 0x846CA68B
"""Multipliers of lowbias32: C. Wellons, "Prospecting for hash functions", 2018."""
FACTOR_BITS = 20

BYTE_PATTERNS = {
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.float8_e5m2: (0x7C, 0x7C),
    torch.float8_e4m3fnuz: (0xFF, 0x80),
    torch.float8_e5m2fnuz: (0xFF, 0x80),
    torch.float8_e8m0fnu: (0xFF, 0xFF),
}
"""Formats of one byte -> (mask, pattern). A byte is NaN or infinite if its bits under the mask are the pattern."""
COUNTED = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64, *BYTE_PATTERNS})
"""Dtypes whose NaN and infinite elements are counted. Of the others only complex ones can have any."""

_SPLITMIX_FIRST, _SPLITMIX_SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_U32, U64 = (1 << 32) - 1, (1 << 64) - 1


def _mix(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Map {0 … 2^bits - 1} onto itself (bits <= 30) by odd multiplications and an xorshift; elementwise, int64."""
    mask = (1 << bits) - 1
    x = x * MIX_FIRST & mask
    return (x ^ x >> bits // 2) * MIX_SECOND & mask


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right and fill with zeros. torch's own shift copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@lru_cache(maxsize=1)
def column_keys() -> torch.Tensor:
    """Return K, (CHUNK_WORDS,) int64 on the CPU. Do not write to it. splitmix64: Steele, Lea and Flood, 2014."""
    column = torch.arange(CHUNK_WORDS)
    z = (column + 1) * LENGTH_KEY
    z = (z ^ _shift(z, 30)) * _SPLITMIX_FIRST
    z = (z ^ _shift(z, 27)) * _SPLITMIX_SECOND
    z = z ^ _shift(z, 31)
    return (z & -(2 * CHUNK_WORDS)) | (2 * _mix(column, 11) + 1)


def chunk_factors(chunks: torch.Tensor) -> torch.Tensor:
    """Return F[c] for every c in `chunks` (int64, below 2^31), as int64 of the same shape."""
    low = (_mix(chunks & (1 << FACTOR_BITS) - 1, FACTOR_BITS) << 12) + 1
    signed = low - (low >> 31 << 32)
    # Products of two 32-bit numbers wrap around in int64; their lower 32 bits are right all the same.
    high = (chunks ^ chunks >> 16) * LOWBIAS_FIRST & _U32
    high = (high ^ high >> 15) * LOWBIAS_SECOND & _U32
    high = high ^ high >> 16
    return (high << 32) + signed


def length_term(nbytes: int) -> int:
    """Return nbytes * L mod 2^64, as a signed 64-bit number."""
    return signed(nbytes * LENGTH_KEY)


def signed(value: int) -> int:
    """Return `value` mod 2^64, as a signed 64-bit number."""
    return (value + (1 << 63) & U64) - (1 << 63)
