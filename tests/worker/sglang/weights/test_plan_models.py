"""Copy plans of SGLang's own models, traced and replayed inside the engine's processes, against `load_weights`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines.plan_models import EXPERTS, assert_exact, findings, write_models

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("kind", "changes", "tensors"),
    [
        ("Qwen2", {"tie_word_embeddings": False}, 27),
        pytest.param("Qwen3", {"tie_word_embeddings": True, "head_dim": 16}, 24, marks=pytest.mark.slow),
        pytest.param("Llama", {"tie_word_embeddings": False}, 21, marks=pytest.mark.slow),
        ("Qwen3Moe", {"tie_word_embeddings": False, "head_dim": 16, **EXPERTS}, 45),
    ],
)
async def test_one_rank(kind: str, changes: dict[str, Any], tensors: int, tmp_path: Path) -> None:
    write_models(tmp_path, kind, **changes)
    [found] = await findings(tmp_path, dtype="float32")
    assert_exact(found)
    assert found["model"] == f"{kind}ForCausalLM"
    assert (found["whole"], found["partial"], found["unused"]) == (tensors, 0, [])
    assert found["exported"] is True


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
