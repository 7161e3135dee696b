"""Digests of tensors: 64 bits each, the same on every device, at the speed of memory.

A tensor's bytes (row-major) are read as signed little-endian 32-bit words w_i, the last one padded with zero bytes.
The words form rows, "chunks", of C = 2048; word i lies in chunk c = floor(i / C) and column j = i mod C:

    digest = nbytes * L + sum_i w_i * k_i  mod 2^64,    k_i = K[j] * F[c]

    K[j] = splitmix64(j) with the lowest 12 bits replaced by 2 * mix(j, 11) + 1
    F[c] = 2^32 * lowbias32(c) + low,  low = 2^12 * mix(c mod 2^20, 20) + 1 read as a signed 32-bit number

where mix(x, b) is a bijection of b-bit numbers (`_mix`) and L an odd constant. It is a multilinear hash (Lemire and
Kaser, "Strongly universal string hashing is fast", 2014) whose keys are products. So the sum over chunks can come
first: a word costs one multiplication by a factor that its whole chunk shares, and K is applied once per column.

Certain are these, because a word's change is less than 2^32, and every k_i is odd and different from the others mod
2^32 (K tells the columns apart mod 2^12, where F is 1; F tells the chunks of a column apart):

- any change of a single word, so any flipped bit, changes the digest;
- so does swapping any two different words of a tensor of up to 8 GiB.

Any other damage (several words changed, shifted or mixed-up slices, other lengths) is missed with a small probability.
It is an estimate and not proved: about 2^-60 if the keys are as good as random, and about 2^-30 if the words differ
only in their highest bits, of which a sum mod 2^64 keeps 33. The keys are fixed and public. So a digest guards against
corruption, and not against forgery.

The sum is additive: the words of a tensor may be summed in any order and in any number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from ...messages.errors import InvalidField
from .digest_keys import BYTE_PATTERNS, CHUNK_WORDS, COUNTED, U64, chunk_factors, column_keys, length_term, signed

if TYPE_CHECKING:
    from .digest_cuda import Launch


_BLOCK_CHUNKS = 64
"""Chunks that a CPU takes at a time: 512 KB of words and 1 MB of products stay in its caches."""


@lru_cache(maxsize=4)
def _factors(bits: int) -> torch.Tensor:
    """Return F of the first 2^bits chunks, (2^bits, 1) int64. Do not write to it."""
    return chunk_factors(torch.arange(1 << bits)).unsqueeze(1)


class Digester:
    """Digests the same tensors again and again. It is prepared once for their addresses. Not safe for several threads.

    tensors: contiguous, on one device, of any dtypes and sizes, also empty. The object keeps them alive. On CUDA each
        run copies those that do not start at a multiple of four bytes to a buffer of their own size.

    Raises InvalidField for tensors that are not contiguous, or on several devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        for place, tensor in enumerate(self._tensors):
            if not tensor.is_contiguous():
                raise InvalidField(f"tensors[{place}]", tuple(tensor.stride()), "strides of a contiguous tensor")
            if tensor.device != self._tensors[0].device:
                raise InvalidField(
                    f"tensors[{place}]", str(tensor.device), f"on {self._tensors[0].device}, as the first one"
                )
        self._launch: Launch | None = None
        if self._tensors and self._tensors[0].is_cuda:
            # Only here: a trainer or a worker without a GPU has no Triton.
            from . import digest_cuda  # noqa: PLC0415

            self._launch = digest_cuda.Launch(self._tensors)

    def run(self, out: torch.Tensor, nonfinite: torch.Tensor | None = None) -> None:
        """Write the digest of every tensor, as it is now, into `out`.

        out: (n,) int64, contiguous, on the tensors' device. It gets the digest's 64 bits as a signed number.
        nonfinite: (n,) int32, contiguous, there, or None. It gets the number of NaN and infinite elements, at most
            2^31 - 1, and 0 for a tensor whose dtype is not in COUNTED.

        On CUDA the work is queued on the current stream of the tensors' device, and the host does not wait. Nothing may
        write the tensors until it is done.
        """
        if self._launch:
            self._launch.run(out, nonfinite)
        elif self._tensors:
            results = [_on_cpu(tensor, nonfinite is not None) for tensor in self._tensors]
            out.copy_(torch.tensor([value for value, _ in results], dtype=torch.int64))
            if nonfinite is not None:
                nonfinite.copy_(torch.tensor([bad for _, bad in results], dtype=torch.int32))


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digests of tensors on one device: (n,) int64 there, or on the CPU if there are no tensors.

    It is a `Digester` used once, but copies tensors that are not contiguous. On CUDA the work is queued on the current
    stream, and the host does not wait. Do not free the tensors to another stream before it is done.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.empty(len(tensors), dtype=torch.int64, device=device)
    Digester([tensor.detach().contiguous() for tensor in tensors]).run(out)
    return out


def look(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return digests, (n,) int64, and counts of NaN and infinite elements, (n,) int32, of tensors on one device, there.

    It is a `Digester` used once. On CUDA the work is queued as that of `digests`.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    out = torch.empty(len(tensors), dtype=torch.int64, device=device)
    nonfinite = torch.empty(len(tensors), dtype=torch.int32, device=device)
    Digester(tensors).run(out, nonfinite)
    return out, nonfinite


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of `tensor` as 16 hex digits. It is computed on the tensor's device, and waited for."""
    return hex_of(digests([tensor]))[0]


def hex_of(values: torch.Tensor) -> list[str]:
    """Return digests, (n,) int64 on any device, as 16 hex digits each. On CUDA it waits for the current stream."""
    return [f"{value & U64:016x}" for value in values.tolist()]


def values_of(hexes: Sequence[str]) -> torch.Tensor:
    """Return digests of 16 hex digits as (n,) int64 on the CPU. Raises InvalidField for any other text."""
    for place, text in enumerate(hexes):
        if len(text) != 16 or not set(text) <= set("0123456789abcdef"):
            raise InvalidField(f"digests[{place}]", text, "16 hex digits, lower case")
    return torch.tensor([signed(int(text, 16)) for text in hexes], dtype=torch.int64)


def _on_cpu(tensor: torch.Tensor, count: bool) -> tuple[int, int]:
    """Return digest (a signed 64-bit number) and count of NaN and Inf of a contiguous tensor outside CUDA."""
    flat = tensor.reshape(-1)
    data = flat.view(torch.uint8)
    keys = column_keys()
    factors = _factors((data.numel() // (4 * CHUNK_WORDS)).bit_length())
    columns = torch.zeros_like(keys) if data.numel() > 4 * CHUNK_WORDS - 4 else None  # else no chunk is full
    products = torch.empty(min(_BLOCK_CHUNKS, len(factors)), CHUNK_WORDS, dtype=torch.int64)
    total, bad = length_term(data.numel()), 0
    block_bytes = 4 * CHUNK_WORDS * _BLOCK_CHUNKS
    for start in range(0, data.numel(), block_bytes):
        first = start // (4 * CHUNK_WORDS)
        words = _words(data[start : start + block_bytes])
        rows, rest = divmod(words.numel(), CHUNK_WORDS)
        if rows and columns is not None:
            torch.mul(words[: rows * CHUNK_WORDS].view(rows, -1), factors[first : first + rows], out=products[:rows])
            columns += products[:rows].sum(0)
        if rest:
            total += int((words[rows * CHUNK_WORDS :] * keys[:rest]).sum()) * int(factors[first + rows])
        if count and flat.dtype in COUNTED:
            bad += _nonfinite(flat[start // flat.element_size() : (start + block_bytes) // flat.element_size()])
    if columns is not None:
        total += int((columns * keys).sum())
    return signed(total), min(bad, (1 << 31) - 1)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return bytes as int32 words. Copies them if they are not aligned, or not a whole number of words."""
    if tail := data.numel() % 4:
        data = torch.cat([data, data.new_zeros(4 - tail)])
    elif data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _nonfinite(part: torch.Tensor) -> int:
    if part.dtype in BYTE_PATTERNS:
        mask, pattern = BYTE_PATTERNS[part.dtype]
        return int(torch.count_nonzero((part.view(torch.uint8) & mask) == pattern))
    # One NaN or infinity makes the sum not finite. So a finite sum, which is fast, shows that the part has none.
    if part.sum(dtype=torch.promote_types(part.dtype, torch.float32)).isfinite():
        return 0
    return int(torch.count_nonzero(~part.isfinite()))
