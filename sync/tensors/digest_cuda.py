"""Digests on a GPU: one kernel for any number of tensors. The definition is in digester.py.

A program takes a block of up to BLOCK_CHUNKS chunks of one region (a tensor's bytes). It sums them column by column
with the chunks' factors, applies the columns' keys to the sums, and adds the result to the region's digest. A word
costs one load and two multiply-adds, and five more instructions if NaN and Inf are counted. So memory is the limit.

It also runs under Triton's interpreter (TRITON_INTERPRET=1, tensors on the CPU). So it is tested without a GPU.
"""

# Triton has no types: its decorator and what it decorates.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .digest_keys import (
    BYTE_PATTERNS,
    CHUNK_WORDS,
    COUNTED,
    FACTOR_BITS,
    LOWBIAS_FIRST,
    LOWBIAS_SECOND,
    MIX_FIRST,
    MIX_SECOND,
    column_keys,
    length_term,
)
from .tables import Table, blocks_of

BLOCK_CHUNKS = 32
"""Chunks per program, 256 KB. It must be below 256, because NaN and Inf are counted in bytes."""
WARPS = 8
UNROLL = 2
"""Chunks per step of the loop. A thread then needs 64 registers, so a multiprocessor holds 32 warps, each thread with
two loads of 16 bytes under way."""
_FIELDS = tl.constexpr(8)
_MIX_FIRST, _MIX_SECOND = tl.constexpr(MIX_FIRST), tl.constexpr(MIX_SECOND)
_LOWBIAS_FIRST, _LOWBIAS_SECOND = tl.constexpr(LOWBIAS_FIRST), tl.constexpr(LOWBIAS_SECOND)
_FACTOR_MASK, _FACTOR_HALF = tl.constexpr((1 << FACTOR_BITS) - 1), tl.constexpr(FACTOR_BITS // 2)

_EXPONENTS = {
    # Exponent masks of the even and the odd words. In a number that is not finite, and in no other, all of these bits
    # are ones. Then adding the lowest of them carries into the bit above them, `carry`, and never further.
    torch.bfloat16: (0x7F807F80, 0x7F807F80, 0x00800080, 0x80008000),
    torch.float16: (0x7C007C00, 0x7C007C00, 0x04000400, 0x80008000),
    torch.float32: (0x7F800000, 0x7F800000, 0x00800000, 0x80000000),
    torch.float64: (0, 0x7FF00000, 0x00100000, 0x80000000),
    torch.float8_e5m2: (0x7C7C7C7C, 0x7C7C7C7C, 0x04040404, 0x80808080),
    torch.float8_e4m3fn: (0x7F7F7F7F, 0x7F7F7F7F, 0x01010101, 0x80808080),
}


@triton.jit
def _factor(chunk):
    """Return `chunk_factors` of one chunk as its lower and its upper 32 bits, both int32."""
    x = chunk.to(tl.uint32)
    low = (x * _MIX_FIRST) & _FACTOR_MASK
    low = (low ^ (low >> _FACTOR_HALF)) * _MIX_SECOND
    low = (low << 12) | 1
    high = (x ^ (x >> 16)) * _LOWBIAS_FIRST
    high = (high ^ (high >> 15)) * _LOWBIAS_SECOND
    high = high ^ (high >> 16)
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def _add(  # noqa: PLR0917
    words, chunk, sums, uppers, bad, exponents, unit, carry, COUNT: tl.constexpr
):
    """Add one chunk's words, (C,) int32, to the columns' sums. w * F = w * low + 2^32 * w * high, modulo 2^64."""
    low, high = _factor(chunk)
    sums += words.to(tl.int64) * low.to(tl.int64)
    uppers += words * high
    if COUNT:
        carries = ((words.to(tl.uint32, bitcast=True) & exponents) + unit) & carry
        bad += carries >> 7  # bits 7, 15, 23 and 31: a counter in each byte
    return sums, uppers, bad


@triton.jit
def _chunks(  # noqa: PLR0917
    start, lane, first, rows, sums, uppers, bad, exponents, unit, carry,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr, COUNT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    for row in tl.range(0, rows, loop_unroll_factor=UNROLL):
        places = start + row * CHUNK + lane
        if ALIGNED:  # without this hint loads are not merged into ones of 16 bytes
            places = tl.multiple_of(places, 16)
        words = tl.load(places, eviction_policy="evict_first")
        sums, uppers, bad = _add(words, first + row, sums, uppers, bad, exponents, unit, carry, COUNT)
    return sums, uppers, bad


# `out` may be any slice. Its alignment is not specialised, because compiling takes a second.
@triton.jit(do_not_specialize_on_alignment=["out", "nonfinite"])
def _kernel(  # noqa: PLR0917
    regions, blocks, keys, out, nonfinite,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """regions: (n, _FIELDS) int64; blocks: (programs,) int64, region * 2^32 + block; keys: (CHUNK,) int64;
    out: (n,) int64; nonfinite: (n,) int32 or int64. The last two are added to."""
    entry = tl.load(blocks + tl.program_id(0))
    region = entry >> 32
    first = (entry & 0xFFFFFFFF).to(tl.int32) * BLOCK
    row = regions + region * _FIELDS
    address = tl.load(row)
    total = tl.load(row + 1)
    tail = tl.load(row + 2).to(tl.int32)
    aligned = tl.load(row + 3)
    unit = tl.load(row + 6).to(tl.uint32)
    carry = tl.load(row + 7).to(tl.uint32)
    lane = tl.arange(0, CHUNK)
    exponents = tl.where(lane % 2 == 0, tl.load(row + 4).to(tl.uint32), tl.load(row + 5).to(tl.uint32))
    start = (address + first.to(tl.int64) * (CHUNK * 4)).to(tl.pointer_type(tl.int32))
    left = total - first.to(tl.int64) * CHUNK
    words = tl.minimum(left, BLOCK * CHUNK).to(tl.int32)
    rows = words // CHUNK
    sums = tl.zeros((CHUNK,), tl.int64)
    uppers = tl.zeros((CHUNK,), tl.int32)
    bad = tl.zeros((CHUNK,), tl.uint32)
    if aligned != 0:
        sums, uppers, bad = _chunks(
            start, lane, first, rows, sums, uppers, bad, exponents, unit, carry, CHUNK, True, COUNT, UNROLL
        )
    else:
        sums, uppers, bad = _chunks(
            start, lane, first, rows, sums, uppers, bad, exponents, unit, carry, CHUNK, False, COUNT, UNROLL
        )
    rest = words - rows * CHUNK
    if rest > 0:
        some = tl.load(start + rows * CHUNK + lane, mask=lane < rest, other=0)
        sums, uppers, bad = _add(some, first + rows, sums, uppers, bad, exponents, unit, carry, COUNT)
    if (tail > 0) & (left <= BLOCK * CHUNK):
        # The last, incomplete word is read byte by byte, because what follows it may be other memory.
        byte = tl.arange(0, 4)
        place = (address + total * 4).to(tl.pointer_type(tl.uint8))
        last = tl.sum(tl.load(place + byte, mask=byte < tail, other=0).to(tl.int32) << (byte * 8))
        chunk = total // CHUNK
        some = tl.where(lane == (total - chunk * CHUNK).to(tl.int32), last, 0)
        sums, uppers, bad = _add(some, chunk.to(tl.int32), sums, uppers, bad, exponents, unit, carry, COUNT)
    value = tl.sum((sums + (uppers.to(tl.int64) << 32)) * tl.load(keys + lane))
    tl.atomic_add(out + region, value, sem="relaxed")
    if COUNT:
        found = tl.sum(((bad & 255) + ((bad >> 8) & 255) + ((bad >> 16) & 255) + (bad >> 24)).to(tl.int32))
        if found > 0:
            tl.atomic_add(nonfinite + region, found.to(nonfinite.dtype.element_ty), sem="relaxed")


class Launch:
    """The kernel's tables for contiguous tensors on one device. Keeps the tensors alive. See `digester.Digester`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._device = tensors[0].device
        self._flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        self._staged = [(flat, torch.empty_like(flat)) for flat in self._flats if flat.data_ptr() % 4]
        copies = {id(flat): copy for flat, copy in self._staged}
        # These formats have a single NaN and no exponent to mask. They are rare in weights, so torch counts them.
        self._others = [i for i, t in enumerate(tensors) if t.dtype in COUNTED and t.dtype not in _EXPONENTS]
        self._dtypes = [tensor.dtype for tensor in tensors]
        rows, programs, self._block_chunks = [], [], BLOCK_CHUNKS
        for tensor, flat in zip(tensors, self._flats, strict=True):
            address = copies.get(id(flat), flat).data_ptr()
            words, tail = divmod(flat.numel(), 4)
            rows.append([address, words, tail, address % 16 == 0, *_EXPONENTS.get(tensor.dtype, (0, 0, 0, 0))])
            programs.append(max(-(-words // (CHUNK_WORDS * self._block_chunks)), min(tail, 1)))
        lengths = torch.tensor([length_term(flat.numel()) for flat in self._flats])
        # The kernel's tables come first, each at a multiple of 16 bytes, for the same reason.
        blocks = blocks_of(torch.tensor(programs))
        self._table = Table(self._device, [column_keys(), torch.tensor(rows), blocks, lengths])
        # Counts are summed in 64 bits only if they could wrap around in 32.
        large = any(tensor.numel() >= 1 << 31 for tensor in tensors)
        self._wide = torch.empty(len(rows), dtype=torch.int64, device=self._device) if large else None
        self._keys, self._regions, self._blocks, self._lengths = self._table.parts
        self._scratch = [copy for _, copy in self._staged] + ([] if self._wide is None else [self._wide])

    def run(self, out: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
        if self._device.type != "cuda":
            return self._run(out, nonfinite)
        with torch.cuda.device(self._device):
            self._table.use(*self._scratch)
            return self._run(out, nonfinite)

    def _run(self, out: torch.Tensor, nonfinite: torch.Tensor | None) -> None:
        for flat, copy in self._staged:
            copy.copy_(flat)
        out.copy_(self._lengths)
        counts = nonfinite if nonfinite is None or self._wide is None else self._wide
        if counts is not None:
            counts.zero_()
        if len(self._blocks):
            _kernel[(len(self._blocks),)](
                self._regions, self._blocks, self._keys, out, out if counts is None else counts,
                CHUNK=CHUNK_WORDS, BLOCK=self._block_chunks, COUNT=counts is not None, UNROLL=UNROLL, num_warps=WARPS,
            )  # fmt: skip
        if counts is not None and nonfinite is not None:
            for place in self._others:
                mask, pattern = BYTE_PATTERNS[self._dtypes[place]]
                counts[place] = ((self._flats[place] & mask) == pattern).sum()
            if counts is not nonfinite:
                nonfinite.copy_(counts.clamp_(max=(1 << 31) - 1))
