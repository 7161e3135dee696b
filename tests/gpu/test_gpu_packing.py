"""Taking a version out of a trainer on GPUs: without waiting, whatever is done to the originals next.

pytest -s tests/gpu/test_packing.py prints the times; run as a script it is a rank of the sharded trainer.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rolloutmq.sync.packing.buckets import release_host_memory
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.digester import digest
from rolloutmq.sync.tensors.snapshot import Snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KEEPS = ["device", "host"]


def weights(device: str = "cuda", count: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every kind of copy: whole words, odd bytes, turned, strided, shifted, empty, of no dimension."""
    torch.manual_seed(seed)
    some = {f"layer{i}": torch.randn(64, 48).to(torch.bfloat16) for i in range(count)}
    tensors = some | {
        "fp32": torch.randn(7),
        "fp16": torch.randn(5, 4).to(torch.float16),
        "fp8": torch.randn(37).to(torch.float8_e4m3fn),
        "int64": torch.arange(5) << 40,
        "yes": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "complex": torch.randn(3, dtype=torch.complex64),
    }
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    tensors["turned"] = torch.randn(40, 60).to(device).t()
    tensors["strided"] = torch.randn(20, 20).to(device)[::3, ::2]
    tensors["shifted"] = torch.randn(65).to(torch.bfloat16).to(device)[1:]
    return tensors


def expected(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests, computed on the CPU."""
    return {name: digest(tensor.cpu().contiguous()) for name, tensor in tensors.items()}


def digests(snapshot: Snapshot) -> dict[str, str]:
    return {spec.name: spec.digest for spec in snapshot.manifest.tensors}


def check(snapshot: Snapshot, wanted: dict[str, str]) -> None:
    """The digests made on the GPU, and those of what is kept, read on the CPU, are the originals'."""
    assert digests(snapshot) == wanted
    assert {name: digest(tensor.cpu()) for name, tensor in snapshot.tensors()} == wanted


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    """What an optimizer does next, on the same stream."""
    for tensor in tensors.values():
        tensor.fill_(1)


@contextmanager
def the_gpu_is_busy() -> Iterator[None]:
    """For at least half a second from now (2 GHz is more than a GPU's clock)."""
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    yield


@contextmanager
def no_wait_allowed() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def elsewhere(packed: PackedWeights) -> Snapshot:
    """`snapshot`, as the publisher calls it: in a thread of its own, on a stream of its own."""
    found: list[Any] = []

    def run() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(packed.snapshot())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("bucket_bytes", [20_000, 1 << 28])
def test_on_the_device_without_waiting(bucket_bytes: int) -> None:
    tensors = weights()
    wanted = expected(tensors)
    PackedWeights(1, tensors, bucket_bytes, keep="device").snapshot()  # memory and kernels are there now
    gc.collect()
    with the_gpu_is_busy(), no_wait_allowed():
        packed = PackedWeights(2, tensors, bucket_bytes, keep="device")
        spoil(tensors)
        assert not packed.ready.query()
    snapshot = elsewhere(packed)
    assert snapshot.device == torch.device("cuda", torch.cuda.current_device())
    check(snapshot, wanted)


@pytest.mark.parametrize("bucket_bytes", [20_000, 1 << 28])
def test_on_the_host(bucket_bytes: int) -> None:
    tensors = weights()
    wanted = expected(tensors)
    with the_gpu_is_busy():
        packed = PackedWeights(1, tensors, bucket_bytes, keep="host")
        spoil(tensors)
    snapshot = elsewhere(packed)
    assert all(bucket.is_pinned() for bucket in snapshot.buckets)
    check(snapshot, wanted)


@pytest.mark.parametrize("keep", KEEPS)
def test_digests_and_gaps_are_the_cpus(keep: Any) -> None:
    on_gpu = PackedWeights(1, weights(), 20_000, keep=keep).snapshot()
    on_cpu = PackedWeights(1, weights("cpu"), 20_000).snapshot()
    assert on_gpu.manifest == on_cpu.manifest
    assert all(torch.equal(one.cpu(), other) for one, other in zip(on_gpu.buckets, on_cpu.buckets, strict=True))


@pytest.mark.parametrize("keep", KEEPS)
def test_nan_and_inf(keep: Any) -> None:
    tensors = weights()
    tensors["layer3"][1, 2] = float("nan")
    tensors["fp32"][6] = float("inf")
    assert set(PackedWeights(1, tensors, 20_000, keep=keep).snapshot().nonfinite) == {"layer3", "fp32"}


def test_auto_stays_on_the_device_where_there_is_room() -> None:
    first = PackedWeights(1, weights(), 20_000)
    second = PackedWeights(2, weights(seed=1), 20_000, like=first.places)
    assert second.places is first.places
    assert all(bucket.is_cuda for bucket in (*first.buckets, *second.buckets))
    check(second.snapshot(), expected(weights(seed=1)))


@pytest.mark.parametrize("room_for", [0, 2])
def test_auto_goes_to_the_host_when_memory_gets_short(monkeypatch: pytest.MonkeyPatch, room_for: int) -> None:
    """Also in the midst of it: what is on the device already moves."""
    asked = 0

    def info(device: Any) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return (100 << 30 if asked <= room_for else 0), 100 << 30

    tensors = weights()
    wanted = expected(tensors)
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    packed = PackedWeights(1, tensors, 20_000)
    spoil(tensors)
    assert asked == room_for + 1
    assert len(packed.buckets) > room_for + 1
    assert all(bucket.is_pinned() for bucket in packed.buckets)
    check(elsewhere(packed), wanted)
    asked = room_for
    again = PackedWeights(2, weights(), 20_000, like=packed.places)
    assert asked == room_for + 1  # the size is known: nothing is begun on the device
    check(again.snapshot(), wanted)


def test_a_copy_on_the_host_takes_one_bucket_on_the_device() -> None:
    tensors = {f"t{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(32)}
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = PackedWeights(1, tensors, 16 << 20, keep="host")
    assert torch.cuda.max_memory_allocated() - before <= 18 << 20  # a bucket, and the digests' tables
    assert [int(tensor[0]) for _, tensor in packed.snapshot().tensors()] == list(range(32))


def test_pinned_memory_is_used_again() -> None:
    def pack(version: int) -> PackedWeights:
        packed = PackedWeights(version, weights(), keep="host")
        packed.snapshot()
        return packed

    gc.collect()
    release_host_memory()  # of other tests
    first, second = pack(1), pack(2)
    places = {bucket.data_ptr() for bucket in (*first.buckets, *second.buckets)}
    del first
    gc.collect()
    third = pack(3)
    assert {bucket.data_ptr() for bucket in third.buckets} <= places
    release_host_memory()
    check(third.snapshot(), expected(weights()))


@pytest.mark.parametrize("keep", [*KEEPS, "auto"])
def test_a_few_tensors_on_the_cpu_come_along(keep: Any) -> None:
    tensors = weights() | {"frequencies": torch.randn(33), "pinned": torch.randn(64, 64).pin_memory()}
    wanted = expected(tensors)
    packed = PackedWeights(1, tensors, keep=keep)
    spoil(tensors)
    check(elsewhere(packed), wanted)
    assert {bucket.is_cuda for bucket in packed.buckets} == {keep != "host"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("keep", [*KEEPS, "auto"])
def test_tensors_on_two_gpus(keep: Any) -> None:
    tensors = {f"{name}.{at}": tensor for at in (0, 1) for name, tensor in weights(f"cuda:{at}", seed=at).items()}
    wanted = expected(tensors)
    packed = PackedWeights(1, tensors, 20_000, keep=keep)
    spoil(tensors)
    check(elsewhere(packed), wanted)
    assert {bucket.device for bucket in packed.buckets} == {torch.device("cuda:0" if keep == "device" else "cpu")}


# --- sharded over two GPUs --------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("offload", ["", "offload"])
@pytest.mark.parametrize("keep", KEEPS)
def test_fsdp2_with_nccl(keep: str, offload: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(Path(__file__).resolve()), keep, offload]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "rank 0: every bit" in run.stdout
    assert "rank 1: nothing kept" in run.stdout


def rank_of_a_sharded_trainer(keep: Any, offload: bool) -> None:
    """Two versions with an optimizer step between them; the first is looked at after the second is taken."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: PLC0415

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()

    def model() -> nn.Module:
        torch.manual_seed(5)
        layers = [nn.Linear(129, 257), nn.Linear(257, 1), nn.Linear(1, 511)]
        return nn.Sequential(*layers).to(torch.bfloat16).to("cpu" if offload else "cuda")

    shards, whole = model(), model()
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for layer in shards:
        fully_shard(layer, offload_policy=policy)
    fully_shard(shards, offload_policy=policy)
    first = PackedWeights(1, shards.named_parameters(), 50_000, keep=keep, leader=rank == 0)
    wanted = [expected(dict(whole.named_parameters()))]
    with torch.no_grad():
        for parameter in (*shards.parameters(), *whole.parameters()):
            parameter.mul_(2)
    second = PackedWeights(2, shards.named_parameters(), 50_000, keep=keep, leader=rank == 0, like=first.places)
    wanted.append(expected(dict(whole.named_parameters())))
    one = torch.ones(1, device="cuda")
    dist.all_reduce(one)
    assert one.item() == 2
    if rank == 0:
        for packed, digests_wanted in zip((first, second), wanted, strict=True):
            check(elsewhere(packed), digests_wanted)
        print("rank 0: every bit", flush=True)
    else:
        assert not first.buckets
        print("rank 1: nothing kept", flush=True)
    dist.destroy_process_group()


# --- speed ------------------------------------------------------------------------------------------------------------


def qwen3_8b() -> dict[str, torch.Tensor]:
    """399 tensors, 16.4 GB: names as in the checkpoint, values as they come."""

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)

    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (12288, 4096),
        "mlp.up_proj": (12288, 4096),
        "mlp.down_proj": (4096, 12288),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    tensors = {"model.embed_tokens.weight": make(151936, 4096)}
    for index in range(36):
        tensors |= {f"model.layers.{index}.{name}.weight": make(*shape) for name, shape in layer.items()}
    return tensors | {"model.norm.weight": make(4096), "lm_head.weight": make(151936, 4096)}


def test_times_at_8b() -> None:
    """The host's part stays small; the GPU's is printed beside what a copy of all tensors takes one by one."""
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GB of free GPU memory")
    tensors = qwen3_8b()
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert len(tensors) == 399

    def timed(what: str, call: Any) -> tuple[Any, float]:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began = time.perf_counter()
        start.record()
        result = call()
        end.record()
        host = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
        gpu = start.elapsed_time(end)
        print(f"{what:32} host {host:8.2f} ms   GPU {gpu:8.2f} ms   {nbytes / gpu / 1e6:7.0f} GB/s")
        return result, host

    print()
    places, hosts, packed = None, [], None
    for version in range(1, 7):
        packed, host = timed(
            f"pack on the device, version {version}",
            lambda version=version: PackedWeights(version, tensors, keep="device", like=places),  # noqa: B023
        )
        places = packed.places
        hosts.append(host)
    for _ in range(3):
        timed("digests and manifest", packed.snapshot)
    copies = [torch.empty_like(tensor) for tensor in tensors.values()]
    for _ in range(2):
        timed("one copy_ per tensor", lambda: [to.copy_(of) for to, of in zip(copies, tensors.values(), strict=True)])
        timed("one _foreach_copy_", lambda: torch._foreach_copy_(copies, list(tensors.values())))
    copies.clear()
    packed = None
    for version in range(1, 4):
        timed(
            f"pack on the host, version {version}",
            lambda version=version: PackedWeights(version, tensors, keep="host", like=places),
        )
    release_host_memory()
    assert min(hosts[3:]) < 20


if __name__ == "__main__":
    rank_of_a_sharded_trainer(sys.argv[1], sys.argv[2] == "offload")
