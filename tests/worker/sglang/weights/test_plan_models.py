"""Copy plans of SGLang's own models, traced and replayed inside the engine's processes, against `load_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines.plan_models import EXPERTS, assert_exact, assert_whole, compared, findings, write_models

from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.mark.asyncio(loop_scope="session")
async def test_the_shared_engines(engine: SGLangEngine, tiny_model: Path, tmp_path: Path) -> None:
    """A mixture of experts: the engine of `test_deterministic`."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    own, other = tiny_model / "model.safetensors", tmp_path / "other.safetensors"
    save_file({name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in load_file(own).items()}, other)
    for place, weights in enumerate((other, own)):  # and back
        [found] = await compared(engine, weights, tmp_path / f"report-{place}")
        assert_whole(found, "Qwen2", weights)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
        ("Llama", {"tie_word_embeddings": False}),
    ],
)
@pytest.mark.slow
async def test_one_rank(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_models(tmp_path, kind, **changes)
    [found] = await findings(tmp_path, dtype="float32")
    assert_whole(found, kind, tmp_path / "b" / "model.safetensors")


@pytest.mark.slow  # `test_expert_parallel` has two ranks, too
async def test_two_ranks_have_a_slice_each(tmp_path: Path) -> None:
    write_models(
        tmp_path, "Qwen3Moe", tie_word_embeddings=False, head_dim=16, **EXPERTS | {"moe_intermediate_size": 128}
    )
    found = await findings(tmp_path, dtype="bfloat16", tp_size=2)
    for rank in found:
        assert_exact(rank)
        assert rank["unused"] == []
        assert rank["partial"] == 45
        assert "does not hold" in rank["exported"]
