"""Copy plans of SGLang's models on a GPU, traced and replayed inside the engine, against `load_weights`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.plan_models import EXPERTS, assert_exact, findings, write_models

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.plan.plan import CopyPlan
from rolloutmq.sync.tensors.digester import digest

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 3, "vocab_size": 32_000}
"""Widths of Qwen3-0.6B, few of its layers."""
ENGINE = {
    "dtype": "bfloat16",
    "mem_fraction": 0.3,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "cuda_graph": False,
    "prefill_cuda_graph": False,
}


@pytest.mark.parametrize(
    ("kind", "changes", "tensors"),
    [
        ("Qwen3", {"tie_word_embeddings": True, "head_dim": 128}, 3 * 11 + 2),
        ("Qwen2", {"tie_word_embeddings": False}, 3 * 12 + 3),
        (
            "Qwen3Moe",
            {"tie_word_embeddings": False, "head_dim": 128, **EXPERTS, "moe_intermediate_size": 768},
            3 * (9 + 12) + 3,
        ),
    ],
)
def test_one_gpu(kind: str, changes: dict[str, Any], tensors: int, tmp_path: Path) -> None:
    write_models(tmp_path, kind, dtype="bfloat16", **SMALL, **changes)
    [found] = asyncio.run(findings(tmp_path, **ENGINE))
    assert_exact(found)
    assert (found["whole"], found["partial"], found["unused"]) == (tensors, 0, [])
    assert found["exported"] is True


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_have_a_slice_each(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": False, "head_dim": 128, **EXPERTS, "moe_intermediate_size": 768}
    write_models(tmp_path, "Qwen3Moe", dtype="bfloat16", **SMALL, **changes)
    # Not what is looked at here, and one of them takes minutes to compile.
    plain = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
    found = asyncio.run(findings(tmp_path, tp_size=2, extra=plain, **ENGINE))
    for rank in found:
        assert_exact(rank)
        assert rank["partial"] > rank["whole"] > 0
        assert "does not hold" in rank["exported"]


def test_a_replay_does_not_wait_for_the_gpu() -> None:
    """Conversions, slices and padding on one device: every copy is queued, whatever runs before it."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(64, 512, dtype=torch.bfloat16, device="cuda"))

    def load(pairs: Any) -> None:
        for name, tensor in pairs:
            rows = {"first": model.weight.data[:20], "second": model.weight.data[20:60, :256]}[name]
            rows.copy_(tensor if name == "first" else tensor[:, :256])
            model.weight.data[60:].fill_(0)

    model.load_weights = load
    tensors = {
        "first": torch.randn(20, 512, dtype=torch.bfloat16, device="cuda"),
        "second": torch.randn(40, 512, device="cuda"),
    }
    snapshot = PackedWeights(1, tensors.items()).snapshot()
    buckets = [bucket.cuda() for bucket in snapshot.buckets]
    [bound] = CopyPlan.trace(model, snapshot.manifest.tensors).for_layout(buckets)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bound.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(model.weight[:20], tensors["first"])
    assert torch.equal(model.weight[20:60, :256], tensors["second"][:, :256].bfloat16())
    assert [(name, digest(view)) for name, view in bound.whole] == [("first", snapshot.manifest.tensors[0].digest)]
