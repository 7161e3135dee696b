"""SGLang's own update group on a tensor-parallel engine: what it can tell of the slices, and what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines.stock_line import StockLine, flip
from support.pools.in_place import Judge, greedy, prompts, write_versions

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.publish import stock
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(300)]
WHOLE = "model.layers.1.input_layernorm.weight"
"""On every rank; of the projections each has a part."""


async def test_every_rank_joins_and_checks_what_it_holds_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    versions = write_versions(tmp_path, 2, dtype="bfloat16")
    engine = SGLangEngine(
        SGLangConfig(model=str(versions[0]), dtype="bfloat16", tp_size=2, max_running=4, max_total_tokens=1024)
    )
    await engine.start()
    try:
        line, tensors = StockLine(engine), load_file(versions[1])
        report = await line.send(PackedWeights(1, tensors.items()).snapshot())
        assert (report.ok, report.phase, report.readback) == (True, "done", False), report
        (prompt,) = prompts(1)
        output = await engine.generate(greedy(prompt, 30, "1"))
        assert Judge(versions).error(prompt, output, [(1, 30)]) < 0.03
        honest = stock.buffers_of

        def damaged(lot: stock.Lot, *, bucketed: bool) -> list[torch.Tensor]:
            buffers = honest(lot, bucketed=bucketed)
            flip(buffers, lot, WHOLE)
            return buffers

        monkeypatch.setattr(stock, "buffers_of", damaged)
        report = await line.send(PackedWeights(2, tensors.items()).snapshot())
        assert (report.ok, report.phase, report.intact) == (False, "verify", False), report
        assert WHOLE in report.error
        monkeypatch.undo()
        tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = float("nan")
        report = await line.send(PackedWeights(3, tensors.items()).snapshot())
        assert not report.ok
        assert "model.layers.1.self_attn.q_proj.weight: has NaN" in report.error
    finally:
        await engine.close()
