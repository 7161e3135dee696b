"""Copies on a GPU: one kernel for any number of them, at the speed of memory.

It also runs under Triton's interpreter (TRITON_INTERPRET=1, tensors on the CPU). So it is tested without a GPU.
"""

# Triton has no types: its decorator and what it decorates.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...messages.model import NCCL_CTAS
from .tables import WORD, Table, blocks_of

STEP_WORDS = 4096
"""Words per block, 16 KB: each thread has four loads of 16 bytes under way before it stores the first."""
BLOCK_WORDS = 16 * STEP_WORDS
WARPS = 8
PROGRAMS = 4
"""Programs per multiprocessor. Each takes one block after the other. More programs are no faster."""
BESIDE_WIRE = 64
"""Programs on the whole GPU while NCCL receives. There are fewer if NCCL would have less than one multiprocessor for
each of its thread blocks. More programs slow down a rank that passes on what it receives, and all ranks behind it: 16
GB to three receivers take 55 ms with PROGRAMS, and 47 ms with this (benchmarks/README.md)."""
_STEP, _BLOCK = tl.constexpr(STEP_WORDS), tl.constexpr(BLOCK_WORDS)


# The second table begins at a place that depends on the number of pairs. Not specialised, because compiling takes a
# second.
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["blocks"])
def _kernel(pairs, blocks, count):
    """pairs: (n, 3) int64, addresses of source and target, and words; blocks: (count,) int64, pair * 2^32 + block."""
    lane = tl.arange(0, _STEP)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        entry = tl.load(blocks + turn)
        row = pairs + (entry >> 32) * 3
        first = (entry & 0xFFFFFFFF) * _BLOCK
        source = (tl.load(row) + first * 4).to(tl.pointer_type(tl.int32))
        target = (tl.load(row + 1) + first * 4).to(tl.pointer_type(tl.int32))
        words = tl.minimum(tl.load(row + 2) - first, _BLOCK).to(tl.int32)
        steps = words // _STEP
        for step in range(0, steps):
            # Without this hint loads and stores are not merged into ones of 16 bytes.
            here = tl.multiple_of(source + step * _STEP + lane, 16)
            there = tl.multiple_of(target + step * _STEP + lane, 16)
            tl.store(there, tl.load(here, eviction_policy="evict_first"))
        place = steps * _STEP + lane
        tl.store(target + place, tl.load(source + place, mask=place < words, other=0), mask=place < words)


class Launch:
    """The kernel's tables for (target, source) pairs on one device that `copies.fits` allows. Keeps them alive."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = list(pairs)
        self._device = pairs[0][0].device
        self._programs, self._beside = PROGRAMS, BESIDE_WIRE
        words = torch.tensor([source.nbytes // WORD for _, source in pairs])
        counts = (words + BLOCK_WORDS - 1) // BLOCK_WORDS
        addresses = torch.tensor([[source.data_ptr(), target.data_ptr()] for target, source in pairs])
        self._table = Table(self._device, [torch.cat([addresses, words.unsqueeze(1)], 1), blocks_of(counts)])
        self._rows, self._blocks = self._table.parts
        if self._device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(self._device).multi_processor_count
            self._programs *= multiprocessors
            self._beside = max(1, min(BESIDE_WIRE, multiprocessors - NCCL_CTAS))

    def run(self, *, beside_wire: bool = False) -> None:
        """Queue the copies on the current stream. beside_wire: NCCL receives meanwhile, see BESIDE_WIRE."""
        if not len(self._blocks):
            return
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                self._table.use()
                self._run(beside_wire)
        else:
            self._run(beside_wire)

    def _run(self, beside_wire: bool) -> None:
        count, programs = len(self._blocks), self._beside if beside_wire else self._programs
        _kernel[(min(count, programs),)](self._rows, self._blocks, count, num_warps=WARPS)
