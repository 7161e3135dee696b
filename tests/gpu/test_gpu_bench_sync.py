"""The weight benchmark over NCCL, at the shape of a small real model: every path works, and nothing hangs.

Figures are committed under benchmarks/results; what a loaded host can keep to is checked here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.sync.bench import PATHS, Plan

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]


def test_on_one_gpu_buckets_are_handed_over_however_large_they_are(tmp_path: Path) -> None:
    figures = harness.run(Plan("0.6b", device="same", rounds=2), tmp_path / "sync.json", quiet=True)["shapes"]["0.6b"]
    assert figures["errors"] == {}
    assert figures["ours_gb_s"] > 0
    assert figures["ours_publish_ms"] > 0
    assert figures["handles"].keys() == {"1", "64", "1024"}  # each was read, at both its ends
    assert figures["handles"]["1024"]["handed_ms"] < 64 * figures["handles"]["1"]["handed_ms"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_path_between_two_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan("0.6b", device="cuda", rounds=5)
    figures = harness.run(plan, tmp_path / "sync.json", quiet=True)["shapes"]["0.6b"]
    with capsys.disabled():
        print({key: value for key, value in figures.items() if key.endswith(("_gb_s", "_ms"))})
    assert figures["errors"] == {}
    for path in PATHS:
        assert figures[f"{path}_gb_s"] > 0
    assert figures["raw_ms"] < min(figures["ours_ms"], figures["stock_bucket_ms"], figures["stock_tensor_ms"])
    assert figures["ours_ms"] < figures["stock_tensor_ms"]
    assert not figures["ours_details"]["ours:direct"]["staged"]
    assert figures["ours_details"]["ours:staged"]["staged"]
    assert all(figures["ours_details"][f"ours:{way}"]["readback"] for way in ("direct", "staged"))
    assert figures["stall_overlapped_ms"] is not None
    assert figures["stall_ms"] is not None
