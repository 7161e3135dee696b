"""Recorded copies on a GPU: every size, wherever it starts, and nothing beside it."""

from __future__ import annotations

import pytest
import torch

from rolloutmq.sync.tensors.copies import Copies

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rolloutmq.sync.tensors.copies_cuda import BLOCK_WORDS, STEP_WORDS

STEP, BLOCK = 4 * STEP_WORDS, 4 * BLOCK_WORDS
SIZES = [0, 1, 2, 3, 4, 16, 4096, STEP - 4, STEP, STEP + 4, BLOCK - 4, BLOCK, BLOCK + 20, 3 * BLOCK + 5, 40 * BLOCK]
OFFSETS = [(0, 0), (16, 16), (0, 16), (4, 4), (1, 1), (8, 0)]


@pytest.mark.parametrize("index", range(min(2, torch.cuda.device_count())))
def test_every_size_and_alignment(index: int) -> None:
    """On the second GPU, too, while the first stays the current one; with few programs, too."""
    device = torch.device("cuda", index)
    source = torch.randint(0, 256, (sum(SIZES) * len(OFFSETS) + (1 << 16),), dtype=torch.uint8, device=device)
    target = torch.zeros(len(source) + (1 << 16), dtype=torch.uint8, device=device)
    wanted, pairs, place = target.clone(), [], 0
    for size in SIZES:
        for of, to in OFFSETS:
            start = place + 64 - place % 64
            pairs.append((target[start + to :][:size], source[start + of :][:size]))
            wanted[start + to :][:size] = source[start + of :][:size]
            place = start + size + 64
    copies = Copies(pairs, often=True)
    assert len(copies._launches) == 1
    copies.run()
    assert torch.equal(target, wanted)
    target.zero_()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        copies.run(beside_wire=True)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(target, wanted)


def test_what_is_no_plain_copy_is_done_all_the_same() -> None:
    source = torch.randn(512, 256, device="cuda")
    targets = [torch.zeros(512, 256, device="cuda", dtype=torch.bfloat16), torch.zeros(256, 512, device="cuda").T]
    Copies([(target, source) for target in targets], often=True).run()
    assert torch.equal(targets[0], source.bfloat16())
    assert torch.equal(targets[1], source)
