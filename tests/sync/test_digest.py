"""Digests: any single change shows, the layout in memory does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.sync import digest as module
from rolloutmq.sync.digest import digest

U64 = 1 << 64


def splitmix64(i: int) -> int:
    z = (i + 1) * 0x9E3779B97F4A7C15 % U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % U64
    return z ^ z >> 31


def by_hand(data: bytes, chunk: int = 1 << 22) -> str:
    """The formula of the module's docstring, in plain integers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    keys = ((splitmix64(i % chunk) | 1) * (2 * (i // chunk) + 1) for i in range(len(words)))
    return f"{sum((word + 1) * key for word, key in zip(words, keys, strict=True)) % U64:016x}"


def of(data: bytes) -> str:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else digest(torch.empty(0))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_it_is_the_formula(data: bytes) -> None:
    assert of(data) == by_hand(data)


def test_pinned() -> None:
    assert digest(torch.arange(10, dtype=torch.float32)) == by_hand(
        b"".join(bytes(torch.tensor([float(i)]).view(torch.uint8).tolist()) for i in range(10))
    )
    assert digest(torch.empty(0)) == "0" * 16


def test_any_single_bit() -> None:
    data = bytearray(range(64))
    seen = {of(bytes(data))}
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(of(bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 64 * 8


def test_swaps_shifts_and_lengths() -> None:
    base = torch.arange(1000, dtype=torch.int32)
    swapped = base.clone()
    swapped[[3, 700]] = base[[700, 3]]
    variants = [base, swapped, base.roll(1), base[:-1], base[1:], torch.cat([base, base.new_zeros(1)]), base.flip(0)]
    assert len({digest(variant) for variant in variants}) == len(variants)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.bool])
def test_every_dtype_is_its_bytes(dtype: torch.dtype) -> None:
    tensor = (torch.arange(37) % 2).to(dtype)
    assert digest(tensor) == by_hand(bytes(tensor.view(torch.uint8).tolist()))


def test_the_same_wherever_it_lies() -> None:
    base = torch.randn(6, 7)
    assert digest(base.t()) == digest(base.t().contiguous())
    assert digest(base.t()) != digest(base)
    assert digest(base[:, ::2]) == digest(base[:, ::2].clone())
    assert digest(base.reshape(42)) == digest(base)
    assert digest(torch.nn.Parameter(base)) == digest(base)
    assert digest(torch.tensor(3.5)) == digest(torch.tensor([3.5]))
    packed = torch.arange(64, dtype=torch.uint8)
    for start in range(5):  # a slice that is not aligned for words
        assert digest(packed[start : start + 9]) == by_hand(bytes(range(start, start + 9)))


def test_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_WORDS", 8)
    module._keys.cache_clear()
    try:
        data = bytes(i * 7 % 256 for i in range(4 * 8 * 3 + 5))
        assert of(data) == by_hand(data, chunk=8)
        words = torch.arange(24, dtype=torch.int32)
        moved = words.clone()
        moved[[0, 8]] = words[[8, 0]]  # the same place in another chunk
        assert digest(moved) != digest(words)
    finally:
        module._keys.cache_clear()


def test_a_real_chunk_border() -> None:
    words = torch.zeros(module.CHUNK_WORDS + 3, dtype=torch.int32)
    before = digest(words)
    seen = {before}
    for place in (0, module.CHUNK_WORDS - 1, module.CHUNK_WORDS, module.CHUNK_WORDS + 2):
        words[place] = 1
        seen.add(digest(words))
        words[place] = 0
    assert len(seen) == 5
    expected = (int(before, 16) + splitmix64(2) * 0 + (splitmix64(2) | 1) * 3 * 5) % U64
    words[module.CHUNK_WORDS + 2] = 5
    assert int(digest(words), 16) == expected
