"""Digests: any single change shows, the layout in memory does not, and the GPU's kernel agrees."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines.interpreter import interpreted

from rolloutmq.messages.errors import InvalidField
from rolloutmq.sync.tensors.digest_keys import CHUNK_WORDS, chunk_factors, column_keys
from rolloutmq.sync.tensors.digester import Digester, digest, digests, hex_of, values_of

U64, LENGTH = 1 << 64, 0x9E3779B97F4A7C15


def splitmix64(i: int) -> int:
    z = (i + 1) * 0x9E3779B97F4A7C15 % U64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % U64
    return z ^ z >> 31


def mix(x: int, bits: int) -> int:
    x = x * 0x2C1B3C6D % (1 << bits)
    return (x ^ x >> bits // 2) * 0x297A2D39 % (1 << bits)


def column_key(j: int) -> int:
    return splitmix64(j) // 4096 * 4096 + 2 * mix(j, 11) + 1


def chunk_factor(c: int) -> int:
    low = (mix(c % (1 << 20), 20) << 12) + 1
    high = (c ^ c >> 16) * 0x7FEB352D % (1 << 32)
    high = (high ^ high >> 15) * 0x846CA68B % (1 << 32)
    high ^= high >> 16
    return (high << 32) + (low if low < 1 << 31 else low - (1 << 32))


def by_hand(data: bytes) -> str:
    """The formula of the module's docstring, in plain integers."""
    total, padded = len(data) * LENGTH, data + bytes(-len(data) % 4)
    factor = 0
    for i in range(len(padded) // 4):
        if i % 2048 == 0:
            factor = chunk_factor(i // 2048)
        total += int.from_bytes(padded[4 * i : 4 * i + 4], "little", signed=True) * column_key(i % 2048) * factor
    return f"{total % U64:016x}"


def of(data: bytes) -> str:
    return digest(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else digest(torch.empty(0))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_it_is_the_formula(data: bytes) -> None:
    assert of(data) == by_hand(data)


# One chunk is 8 KiB; 64 of them are summed at a time.
@pytest.mark.parametrize("size", [8188, 8191, 8192, 8193, 8196, 3 * 8192 + 5, 64 * 8192, 64 * 8192 + 2, 65 * 8192 + 7])
def test_it_is_the_formula_over_chunks(size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert of(data) == by_hand(data)


def test_keys_of_far_chunks_are_the_formula() -> None:
    chunks = [0, 1, 2, 1000, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 31) - 1]
    assert [c % U64 for c in chunk_factors(torch.tensor(chunks)).tolist()] == [chunk_factor(c) % U64 for c in chunks]


def test_pinned() -> None:
    """A digest of another release would make every worker refuse every version."""
    assert digest(torch.empty(0)) == "0" * 16
    assert digest(torch.arange(10, dtype=torch.float32)) == "4065a722a4136348"
    assert digest(torch.arange(1 << 18, dtype=torch.int32)) == "17980b6409480000"


def test_what_makes_a_change_of_one_word_and_a_swap_certain() -> None:
    """Keys are odd, and different mod 2^32 for the 2^31 words of 8 GiB: columns mod 2^12, a column's chunks above."""
    keys, factors = column_keys(), chunk_factors(torch.arange(1 << 20))
    assert CHUNK_WORDS == len(keys) == 2048
    assert len(torch.unique(keys % 4096)) == 2048
    assert bool((keys % 2 == 1).all())
    assert bool((factors % 4096 == 1).all())
    assert len(torch.unique(factors % (1 << 32))) == 1 << 20


def test_any_single_bit() -> None:
    data = bytearray(range(64))
    seen = {of(bytes(data))}
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(of(bytes(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 64 * 8


def bits_of_long(words: torch.Tensor) -> Iterator[tuple[int, int]]:
    random_state = random.Random(4)
    edges = [0, 2047, 2048, 64 * 2048 - 1, 64 * 2048, words.numel() - 1]
    for place in [*edges, *(random_state.randrange(words.numel()) for _ in range(50))]:
        yield place, -(1 << 31) if place % 2 else 1 << random_state.randrange(31)


def test_a_bit_or_a_swap_anywhere_in_a_long_tensor() -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (70 * 2048 + 77,), generator=torch.Generator().manual_seed(1)).int()
    before = digest(words)
    for place, bit in bits_of_long(words):
        changed = words.clone()
        changed[place] ^= bit
        assert digest(changed) != before
        # The hardest pair to tell apart: two words that differ in their highest bit only.
        pair = words.clone()
        other = (place * 7919 + 2048) % words.numel()
        pair[other] = pair[place] ^ -(1 << 31)
        swapped = pair.clone()
        swapped[[place, other]] = pair[[other, place]]
        assert digest(swapped) != digest(pair)


def test_swaps_shifts_and_lengths() -> None:
    base = torch.arange(10_000, dtype=torch.int32)
    swapped = base.clone()
    swapped[[3, 7000]] = base[[7000, 3]]
    variants = [base, swapped, base.roll(1), base.roll(2048), base[:-1], base[1:], base.flip(0), -base]
    variants += [torch.cat([base, base.new_zeros(1)]), torch.cat([base.new_zeros(1), base]), torch.zeros_like(base)]
    p, q = torch.full((2048,), 1.0), torch.full((2048,), -1.0)
    variants += [torch.cat(order) for order in ([p, q, q, p], [q, p, p, q], [p, p, q, q], [p, q, p, q], [q, p, q, p])]
    variants += [torch.zeros(count, dtype=torch.uint8) for count in range(9)]
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
        for size in range(9, 14):
            assert digest(packed[start : start + size]) == by_hand(bytes(range(start, start + size)))


def test_a_digester_reads_the_tensors_anew() -> None:
    tensors = [torch.ones(5, dtype=torch.bfloat16), torch.empty(0), torch.ones(3000)]
    digester, out = Digester(tensors), torch.full((3,), 7)
    digester.run(out)
    assert hex_of(out) == [digest(tensor) for tensor in tensors] == hex_of(digests(tensors))
    tensors[2][2999] = 2.0
    digester.run(out)
    assert hex_of(out)[2] == digest(tensors[2])
    assert torch.equal(values_of(hex_of(out)), out)
    assert digests([]).shape == (0,)


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8])
def test_nonfinite_elements_are_counted(dtype: torch.dtype) -> None:
    clean = torch.full((700_001,), torch.finfo(dtype).max, dtype=torch.float64).to(
        dtype
    )  # several blocks, and a sum that overflows
    dirty = clean.clone()
    for place in (0, 1, 2, 9999, 524_287, 524_288, 700_000):
        dirty[place] = float("nan")
    out, nonfinite = torch.empty(2, dtype=torch.int64), torch.full((2,), 9, dtype=torch.int32)
    Digester([clean, dirty]).run(out, nonfinite)
    assert nonfinite.tolist() == [0, 7]
    assert hex_of(out) == [digest(clean), digest(dirty)]


def test_every_pattern_of_a_small_float() -> None:
    patterns = [torch.arange(256, dtype=torch.uint8).view(dtype) for dtype in FLOATS_8]
    patterns += [torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype) for dtype in FLOATS[:2]]
    nonfinite = torch.empty(len(patterns), dtype=torch.int32)
    Digester(patterns).run(torch.empty(len(patterns), dtype=torch.int64), nonfinite)
    assert nonfinite.tolist() == [int((~tensor.float().isfinite()).sum()) for tensor in patterns]
    nonfinite = torch.empty(1, dtype=torch.int32)
    Digester([torch.full((9,), -1, dtype=torch.int32)]).run(torch.empty(1, dtype=torch.int64), nonfinite)
    assert nonfinite.tolist() == [0]  # these bits would be NaN in a float


def test_what_it_refuses() -> None:
    with pytest.raises(InvalidField, match=r"tensors\[1\]"):
        Digester([torch.ones(2), torch.ones(2, 3).t()])
    with pytest.raises(InvalidField, match=r"tensors\[1\].*meta"):
        Digester([torch.ones(2), torch.ones(2, device="meta")])
    for text in ("0" * 15, "0" * 15 + "G", "-" + "0" * 15, " " + "1" * 15):
        with pytest.raises(InvalidField, match=r"digests\[1\]"):
            values_of(["0" * 16, text])


INTERPRETED = """
import json, torch
from rolloutmq.sync.tensors.digester import Digester
from rolloutmq.sync.tensors.digest_cuda import Launch

torch.manual_seed(0)
packed = torch.randint(0, 256, (600_000,), dtype=torch.uint8)
block = 32 * 8192  # bytes of one program
tensors = [packed[a:b] for a, b in [
    (0, 0), (0, 1), (0, 3), (0, 4), (4, 11), (16, 8208), (20, 8212), (0, 8191), (0, 8195), (0, block - 1), (0, block),
    (4, 4 + block), (16, block + 19), (0, 2 * block - 2), (8, 2 * block + 4096), (1, 2), (3, 8300), (2, block + 5)]]
for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn,
              torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.int32):
    size = torch.empty(0, dtype=dtype).element_size()
    tensors += [packed[16 * size:16 * size + 20_000 * size].view(dtype)]  # random bits: many are not finite
    tensors += [torch.ones(5001).to(dtype), torch.full((300_001,), 1).to(dtype)[1:]]
    tensors += [torch.full((4099,), -1, dtype=torch.int64).view(torch.uint8)[:4099 * size].view(dtype)]
wanted, found, bare = (torch.full((len(tensors),), 5) for _ in range(3))
bad, seen = (torch.full((len(tensors),), 5, dtype=torch.int32) for _ in range(2))
Digester(tensors).run(wanted, bad)
launch = Launch(tensors)
launch.run(found, seen)
launch.run(bare, None)
print(json.dumps([x.tolist() for x in (wanted, found, bare, bad, seen)]))
"""


@pytest.mark.slow
def test_the_kernel_agrees_in_tritons_interpreter() -> None:
    """Its logic, that is; on a GPU tests/gpu/test_gpu_digest.py does the same with the compiled one."""
    wanted, found, bare, bad, seen = interpreted(INTERPRETED)
    assert found == bare == wanted
    assert seen == bad
    assert sum(1 for count in bad if count) >= 12
