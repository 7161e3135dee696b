"""Digests on a GPU: the values of the CPU, for any address and size, and at the speed of its memory (printed).

python -m pytest -q -s tests/gpu/test_gpu_digest.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rolloutmq.sync.tensors import digester as module
from rolloutmq.sync.tensors.digester import Digester, digest, digests, hex_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rolloutmq.sync.tensors import digest_cuda

BLOCK = digest_cuda.BLOCK_CHUNKS * module.CHUNK_WORDS * 4  # bytes of one program
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FLOATS_8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


@pytest.fixture(scope="module", params=range(min(2, torch.cuda.device_count())), ids=lambda index: f"cuda:{index}")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The second one too where there is one, while the first stays the current device."""
    return torch.device("cuda", request.param)


def compare(tensors: list[torch.Tensor]) -> list[int]:
    """Runs `tensors` and copies of them on the CPU; returns the counts of what is not finite."""
    on_cpu = [tensor.cpu() for tensor in tensors]
    results = []
    for group in (on_cpu, tensors):
        out = torch.full((len(group),), 5, device=group[0].device)
        bad = torch.full((len(group),), 5, dtype=torch.int32, device=group[0].device)
        digester = Digester(group)
        digester.run(out, bad)
        again = torch.full_like(out, 6)
        digester.run(again)
        assert torch.equal(out, again)
        results.append((hex_of(out), bad.tolist()))
    assert results[1] == results[0]
    return results[0][1]


def slices(packed: torch.Tensor) -> Iterator[torch.Tensor]:
    sizes = [0, 1, 2, 3, 4, 5, 7, 8, 63, 4096, 8188, 8191, 8192, 8193, 8196, 16383, 65539, 4 * 65536 + 6, BLOCK - 1]
    sizes += [BLOCK, BLOCK + 1, BLOCK + 4, BLOCK + 8195, 3 * BLOCK - 3, 3 * BLOCK, 5 * BLOCK + 123_457]
    for size in sizes:
        for offset in (0, 1, 2, 3, 4, 8, 12, 16, 4098):
            yield packed[offset : offset + size]


def test_every_size_and_alignment(device: torch.device) -> None:
    packed = torch.randint(0, 256, (6 * BLOCK + 200_000,), dtype=torch.uint8, device=device)
    compare(list(slices(packed)))


def test_every_dtype_and_shape(device: torch.device) -> None:
    packed = torch.randint(0, 256, (16_000_000,), dtype=torch.uint8, device=device)
    tensors = []
    for dtype in [*FLOATS, *FLOATS_8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]:
        flat = packed.view(torch.uint8 if dtype == torch.bool else dtype)
        flat = (flat > 127) if dtype == torch.bool else flat
        for shape in ((), (1,), (3, 5), (1023, 7), (2048,), (1000, 1001)):
            size = torch.Size(shape).numel()
            tensors += [flat[start : start + size].view(shape) for start in (0, 1, 8)]
    bad = compare(tensors)
    assert sum(1 for count in bad if count) > 50
    odd = packed[: 7 * 999_999].view(7, -1)
    for tensor in (odd.t(), odd[:, 1::3], torch.nn.Parameter(odd.float())):
        assert digest(tensor) == digest(tensor.cpu())


def test_more_than_2_31_bytes(device: torch.device) -> None:
    size = (1 << 31) + 5 * 8192 + 3
    packed = torch.empty(size + 13, dtype=torch.uint8, device=device).random_(0, 256)
    for tensor in (packed[:size], packed[4 : 4 + size]):
        before = digest(tensor)
        assert before == digest(tensor.cpu())
        tensor[-1] ^= 128
        assert digest(tensor) == digest(tensor.cpu()) != before


def test_a_flipped_bit_anywhere(device: torch.device) -> None:
    """Every bit of a word, in every part of a tensor whose start is not a multiple of 16 bytes."""
    words = torch.randint(-(1 << 31), 1 << 31, (3 * BLOCK // 4 + 1000 + 1,), device=device).int()[1:]
    places = [*range(0, words.numel(), 199), words.numel() - 1]
    values = torch.empty(len(places) + 1, dtype=torch.int64, device=device)
    digester = Digester([words])
    digester.run(values[-1:])
    for index, place in enumerate(places):
        bit = -(1 << 31) if index % 32 == 31 else 1 << index % 32
        words[place] ^= bit
        digester.run(values[index : index + 1])
        words[place] ^= bit
    assert len(torch.unique(values)) == len(places) + 1


@pytest.mark.parametrize("dtype", [*FLOATS, *FLOATS_8])
def test_nonfinite_elements_are_counted(device: torch.device, dtype: torch.dtype) -> None:
    clean = torch.full((700_001,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype).to(device)
    dirty = clean.view(torch.uint8).clone().view(dtype)
    nan = torch.tensor([float("nan")]).to(dtype).to(device).view(torch.uint8)
    data = dirty.view(torch.uint8).view(-1, dirty.element_size())
    for place in (0, 1, 2, 9999, 65_536, 524_287, 524_288, 700_000):
        data[place] = nan
    full = torch.full((1_000_003,), float("nan")).to(dtype).to(device)
    ones = torch.full((8_000_003,), -1, dtype=torch.int32, device=device)
    assert compare([clean, dirty, dirty[1:], full, ones]) == [0, 8, 7, 1_000_003, 0]


def test_in_the_order_of_its_stream_without_waiting(device: torch.device) -> None:
    base = torch.zeros(50_000_000, dtype=torch.bfloat16, device=device)
    expected = [digest(torch.full_like(base, float(value))) for value in range(8)]
    misaligned = base.view(torch.uint8)[1:-1].view(-1)
    digester, outs = Digester([base, misaligned]), torch.empty(8, 2, dtype=torch.int64, device=device)
    digests([base])  # compiles
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            for value in range(8):
                base.fill_(float(value))
                digester.run(outs[value])
            late = digests([base, base[:1]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert hex_of(outs[:, 0]) == expected
    assert hex_of(late)[0] == expected[7]
    assert hex_of(outs[:, 1])[7] == digest(misaligned)


def rate(digester: Digester, out: torch.Tensor, bad: torch.Tensor | None, nbytes: int) -> float:
    """The best of 10 runs, in GB/s."""
    best = float("inf")
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        digester.run(out, bad)
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return nbytes / best / 1e6


@pytest.mark.parametrize(("count", "words"), [(400, 10_000_000), (310, 960_000)], ids=["16GB", "1.2GB"])
def test_the_speed_of_memory(monkeypatch: pytest.MonkeyPatch, count: int, words: int) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * count * words * 1.2:
        pytest.skip("not enough free memory")
    packed = torch.ones(2 * count * words, dtype=torch.bfloat16, device="cuda")
    tensors = list(packed.view(count, -1).unbind(0))
    out, bad = (
        torch.empty(count, dtype=torch.int64, device="cuda"),
        torch.empty(count, dtype=torch.int32, device="cuda"),
    )
    as_it_is = rate(Digester(tensors), out, bad, packed.nbytes)
    first = out.clone()
    print(f"\n{count} tensors, {packed.nbytes / 1e9:.1f} GB on {torch.cuda.get_device_name()}: {as_it_is:.0f} GB/s")
    settings = [(32, warps, unroll) for warps, unroll in ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (16, 2))]
    for chunks, warps, unroll in [*settings, (16, 8, 2), (64, 8, 2)]:
        monkeypatch.setattr(digest_cuda, "BLOCK_CHUNKS", chunks)
        monkeypatch.setattr(digest_cuda, "WARPS", warps)
        monkeypatch.setattr(digest_cuda, "UNROLL", unroll)
        digester = Digester(tensors)
        rates = [rate(digester, out, counts, packed.nbytes) for counts in (bad, None)]
        assert torch.equal(out, first)
        print(
            f"  chunks {chunks}, warps {warps:2}, unroll {unroll}: {rates[0]:.0f}, without counts {rates[1]:.0f} GB/s"
        )
    if "H200" in torch.cuda.get_device_name() and packed.nbytes > 1e10:
        assert as_it_is >= 3000
