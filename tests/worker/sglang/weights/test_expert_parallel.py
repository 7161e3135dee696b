"""A version received by an engine whose experts are spread over its ranks: each takes its own and knows the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines.fixtures import EngineUnderTest
from support.engines.plan_models import EXPERTS, assert_exact, compared, write_models
from test_own_ranks import OwnLine, check_equal

from rolloutmq.worker.sglang.config import SGLangConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


async def test_every_rank_takes_its_experts_and_a_missing_one_is_named(tmp_path: Path) -> None:
    """On a CPU SGLang cannot run a mixture of experts, so what its parameters hold is compared by digest (readback).

    At first its copy plan with what `load_weights` does; see test_plan_models.py.
    """
    from safetensors.torch import load_file  # noqa: PLC0415

    changes = {"tie_word_embeddings": False, "head_dim": 16, **EXPERTS | {"moe_intermediate_size": 128}}
    write_models(tmp_path, "Qwen3Moe", "bfloat16", **changes)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    engine = EngineUnderTest(
        SGLangConfig(
            model=str(tmp_path / "a"),
            dtype="bfloat16",
            tp_size=2,
            max_running=4,
            max_total_tokens=2048,
            **({"ep_size": 2} if "ep_size" in SGLangConfig.model_fields else {"extra": {"ep_size": 2}}),
        )
    )
    await engine.start()
    line = OwnLine(engine)
    try:
        for name in "ba":  # and back
            ranks = await compared(engine, tmp_path / name / "model.safetensors", tmp_path / f"report-{name}")
            for found in ranks:
                assert_exact(found)
            first, second = (set(found["unused"]) for found in ranks)  # each the other's experts
            assert (first & second, first | second) == (set(), {name for name in tensors if ".experts." in name})
            assert [found["partial"] for found in ranks] == [10, 10]  # attention, embedding and head, by slices
        report = await line.send(1, {name: tensor for name, tensor in tensors.items() if name != EXPERT})
        assert (report.ok, report.intact) == (False, True), report
        assert EXPERT in report.error
        report = await line.send(2, tensors)
        assert (report.ok, report.phase, report.readback) == (True, "done", True), report
        assert report.tensors == len(tensors)
        saved = await engine.operate("export", {"path": str(tmp_path / "saved"), "version": 2})  # of both ranks' pieces
        assert saved["of_the_trainer"]
        assert check_equal(Path(saved["path"]), tensors) == 1
    finally:
        line.hub.close()
        await engine.close()
