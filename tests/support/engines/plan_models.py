"""What tests of copy plans inside engines share: two checkpoints of one configuration, and an engine that compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.worker.cpu_support import prepare_transformers
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.sglang.weights import run_loader

DENSE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 500,  # SGLang pads it to 512, so some elements of the embedding are never sent
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class PlanEngine(SGLangEngine):
    _weight_loader = "support.engines.plan_loader.check"


def write_models(folder: Path, kind: str, dtype: str = "float32", **changes: Any) -> None:
    """folder/a and folder/b: two checkpoints of one configuration, with different weights."""
    pytest.importorskip("sglang")
    prepare_transformers()
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    config = getattr(transformers, f"{kind}Config")(**DENSE | changes)
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():  # norms start as ones: every tensor should tell the two apart
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        model.to(getattr(torch, dtype)).save_pretrained(folder / name)


async def findings(folder: Path, **config: Any) -> list[dict[str, Any]]:
    """What the hook found on every rank."""
    engine = PlanEngine(
        SGLangConfig(model=str(folder / "a"), max_running=4, max_total_tokens=1024, random_seed=1, **config)
    )
    await engine.start()
    try:
        return await compared(engine, folder / "b" / "model.safetensors", folder / "report")
    finally:
        await engine.close()


async def compared(engine: SGLangEngine, weights: Path, report: Path) -> list[dict[str, Any]]:
    """What the hook finds on every rank of an engine that runs and is idle; it has these weights then."""
    size = engine.config.tp_size
    text = json.dumps({"weights": str(weights), "report": str(report)})
    await run_loader(engine._run.manager, engine._weight_loader, text, size)
    return [_read(Path(f"{report}.rank{rank}")) for rank in range(size)]


def _read(report: Path) -> dict[str, Any]:
    return dict(json.loads(report.read_text()))


def assert_exact(found: dict[str, Any]) -> None:
    assert "error" not in found, found["error"]
    assert found["touched_by_trace"] == []
    assert found["wrong_after_replay"] == []
    assert found["changed_by_load"] == found["parameters"]
    assert found["missing"] == []
    assert (found["wrong_whole"], found["wrong_partial"]) == ([], [])


def assert_whole(found: dict[str, Any], kind: str, weights: Path) -> None:
    """Of an engine of one rank: each tensor has a place of its own in it."""
    from safetensors import safe_open  # noqa: PLC0415

    assert_exact(found)
    with safe_open(weights, "pt") as file:
        count = len(file.keys())
    assert found["model"] == f"{kind}ForCausalLM"
    assert (found["whole"], found["partial"], found["unused"]) == (count, 0, [])
    assert found["exported"] is True
