"""Snapshots from buckets on a GPU, and back to it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from rolloutmq.sync.disk import write as disk_write  # noqa: E402
from rolloutmq.sync.disk.store import SnapshotStore  # noqa: E402
from rolloutmq.sync.packing.packing import PackedWeights  # noqa: E402


def test_from_a_gpu_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks smaller than a tensor, and with what fills the buckets still queued when `save` is called."""
    monkeypatch.setattr(disk_write, "CHUNK", 1 << 20)
    weights = {f"w{i}": torch.randn(3, 1 << 20, device="cuda").to(torch.bfloat16) for i in range(8)}
    weights["odd"] = torch.randint(-100, 100, (33,), dtype=torch.int8, device="cuda")
    sent = PackedWeights(1, weights.items(), 16 << 20, keep="device").snapshot()
    assert sent.device.type == "cuda"
    expected = [bucket.clone() for bucket in sent.buckets]
    for bucket in sent.buckets:
        bucket.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for bucket, content in zip(sent.buckets, expected, strict=True):
        bucket.copy_(content, non_blocking=True)
    store = SnapshotStore(tmp_path)
    store.save(sent)  # reads back what it wrote, and compares with the digests made on the GPU
    with store.load() as found:
        found.verify()
        assert found.manifest == sent.manifest
