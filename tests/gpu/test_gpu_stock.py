"""SGLang's own update group over NCCL, checked as our own transfers are: `pytest tests/gpu/test_gpu_stock.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from support.engines.stock_line import StockLine, flip
from support.pools.in_place import Judge, greedy, prompts, write_versions

from rolloutmq.sync.packing.packing import PackedWeights
from rolloutmq.sync.publish import stock
from rolloutmq.sync.tensors.snapshot import Snapshot
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs: the engine's, and the trainer's"),
    pytest.mark.timeout(600),
]
TOLERANCE = 0.02
"""Of a log-probability: the engine computes in bfloat16, the reference in float32 on the same bfloat16 weights."""
VICTIM = "model.layers.1.self_attn.k_proj.weight"


def snapshot(version: int, path: Path, device: str) -> Snapshot:
    from safetensors.torch import load_file  # noqa: PLC0415

    with torch.cuda.device(1):
        return PackedWeights(version, load_file(path, device=device).items(), 100_000, keep="device").snapshot()


async def _run(versions: list[Path], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SGLangEngine(
        SGLangConfig(
            model=str(versions[0]),
            dtype="bfloat16",
            max_running=8,
            max_total_tokens=50_000,
            attention_backend="triton",
            sampling_backend="pytorch",
            prefill_cuda_graph=False,
        )
    )
    judge = Judge(versions, "cuda")
    (prompt,) = prompts(1)
    await engine.start()
    try:
        line, groups = StockLine(engine), set()
        for version in (1, 2):
            report = await line.send(snapshot(version, versions[version], device))
            assert (report.ok, report.phase, report.readback) == (True, "done", True), report
            output = await engine.generate(greedy(prompt, 40, str(version)))
            assert judge.error(prompt, output, [(version, 40)]) < TOLERANCE
            groups.add(line.group)
        assert len(groups) == 1
        honest = stock.buffers_of

        def damaged(lot: stock.Lot, *, bucketed: bool) -> list[torch.Tensor]:
            buffers = honest(lot, bucketed=bucketed)
            flip(buffers, lot, VICTIM)
            return buffers

        monkeypatch.setattr(stock, "buffers_of", damaged)
        report = await line.send(snapshot(3, versions[1], device))
        assert (report.ok, report.phase, report.intact) == (False, "verify", False), report
        assert VICTIM in report.error
        monkeypatch.setattr(stock, "buffers_of", honest)
        report = await line.send(snapshot(4, versions[1], device))  # in a new group: the old one is given up first
        assert (report.ok, report.readback) == (True, True), report
        output = await engine.generate(greedy(prompt, 40, "4"))
        assert judge.error(prompt, output, [(1, 40)]) < TOLERANCE
    finally:
        await engine.close()


@pytest.mark.parametrize("device", ["cuda:1", "cpu"], ids=["nccl", "gloo"])
def test_checked_updates_through_sglangs_own_group(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_run(write_versions(tmp_path, 3, dtype="bfloat16"), device, monkeypatch))
