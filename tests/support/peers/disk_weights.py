"""Small versions of weights for the tests of snapshots on disk, and what must hold in a folder whatever happened."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rolloutmq.sync.disk.store import SnapshotStore
from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.tensors.snapshot import Snapshot


def tensors(version: int) -> dict[str, torch.Tensor]:
    base = torch.Generator().manual_seed(version)
    return {
        "model.embed.weight": torch.randn(50, 30, generator=base).to(torch.bfloat16),
        "odd": torch.randint(-100, 100, (33,), dtype=torch.int8, generator=base),
        "norm": torch.randn(70, generator=base),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(float(version)),
        "fp64": torch.randn(3, dtype=torch.float64, generator=base),
        "yes": torch.tensor([True, False, True]),
        "fp8": torch.randn(6, generator=base).to(torch.float8_e4m3fn),
        "größe/../../x": torch.randn(40, 60, generator=base).t(),
    }


def snapshot(version: int, seed: int | None = None, bucket_bytes: int = 5000) -> Snapshot:
    return PackedWeights(version, tensors(version if seed is None else seed).items(), bucket_bytes).snapshot()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def check_versions(store: SnapshotStore, folder: Path) -> list[int]:
    """Whatever is named a version is whole, and is the one that was saved under that number."""
    for version in store.versions():
        with store.load(version) as found:
            found.verify()
            sent = {name: bits(tensor) for name, tensor in tensors(version).items()}
            assert {spec.name: bits(tensor) for spec, tensor in found} == sent
    names = {name for name in os.listdir(folder) if name[0] == "v" and "." not in name} if folder.is_dir() else set()
    assert names == {f"v{version:012d}" for version in store.versions()}
    return store.versions()


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith((".new-", ".gone-"))]
