"""Commands to a worker with a real engine on a GPU: overlap scheduling, CUDA graphs, LoRA; one engine for all of it."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools.gpu import Pool, check_greedy, running
from support.pools.pool import eventually

from rolloutmq.ops.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]
LONG = 1500
RANK = 8


def peft(folder: Path, tensors: dict[str, torch.Tensor], version: int) -> str:
    """An adapter for q_proj as PEFT's save_pretrained writes it."""
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    seeded, made = torch.Generator().manual_seed(version), {}
    for name, weight in tensors.items():
        if name.endswith("q_proj.weight"):
            outputs, inputs = weight.shape
            module = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{module}.lora_A.weight"] = (torch.randn(RANK, inputs, generator=seeded) / inputs**0.5).bfloat16()
            made[f"{module}.lora_B.weight"] = torch.randn(outputs, RANK, generator=seeded).bfloat16()
    save_file(made, folder / "adapter_model.safetensors")
    return str(folder)


async def _pauses(pool: Pool, model: Path) -> None:
    for mode in ("in_place", "interrupt", "retract"):
        flying = await pool.fly(LONG)
        told = await pool.tell(pool.control.pause(mode))  # type: ignore[arg-type]
        assert told["paused"] == mode
        await pool.tell(pool.control.resume())
        (result,) = await pool.client.wait(flying, 120)
        assert len(result.token_ids) == LONG, mode
        check_greedy(model, result)
    await pool.tell(pool.control.flush_cache())


async def _weights(pool: Pool, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    expected = (await pool.generate(64)).token_ids.tolist()
    saved = [await pool.tell(pool.control.save(str(folder), format=kind)) for kind in ("safetensors", "sharded")]
    changed = {name: (tensor * 1.25 if tensor.dim() > 1 else tensor) for name, tensor in tensors.items()}
    report = await asyncio.to_thread(pool.source.publish(1, changed.items()).wait, 60.0)
    assert report.state == "committed", report
    assert (await pool.generate(64)).token_ids.tolist() != expected
    found = await pool.control.audit()
    assert found.clean, found
    (answer,) = found.answers.values()
    assert answer.result["compared"] == len(tensors)
    for version, each in enumerate(saved, start=2):
        await pool.tell(pool.control.load(str(each["path"]), version))
        result = await pool.generate(64)
        assert (result.versions, result.token_ids.tolist()) == ((version,), expected)


async def _adapters(pool: Pool, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    plain = (await pool.generate(64)).token_ids.tolist()
    first, second = (peft(folder / str(version), tensors, version) for version in (1, 2))
    await pool.tell(pool.control.load_adapter("math", 1, first))
    one = await pool.generate(64, lora="math")
    await pool.tell(pool.control.load_adapter("math", 2, second))
    two = await pool.generate(64, lora="math")
    assert (one.adapter_version, two.adapter_version) == (1, 2)
    assert len({tuple(plain), tuple(one.token_ids.tolist()), tuple(two.token_ids.tolist())}) == 3
    listed = await pool.tell(pool.control.adapters())
    assert (listed["adapters"], listed["pinned"]) == ({"math": [1, 2]}, ["math@1", "math@2"])

    async def unloaded() -> bool:
        return (await pool.control.unload_adapter("math")).ok

    await eventually(unloaded, timeout=30.0)
    assert (await pool.tell(pool.control.adapters()))["adapters"] == {}
    assert (await pool.generate(64)).token_ids.tolist() == plain


async def _profile(pool: Pool, folder: Path) -> None:
    await pool.tell(pool.control.start_profile(str(folder)))
    await pool.generate(16)
    stopped = await pool.tell(pool.control.stop_profile())
    assert stopped["files"]
    traces = [(folder / name).read_bytes() for name in stopped["files"]]
    plain = [gzip.decompress(trace) if trace[:2] == b"\x1f\x8b" else trace for trace in traces]
    assert any('"kernel"' in trace.decode(errors="replace") for trace in plain)  # what ran on the GPU is in it


def test_commands(tmp_path: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415

    model = tmp_path / "model"
    write_tiny_model(model, context=2048)
    tensors: dict[str, Any] = load_file(model / "model.safetensors")

    async def run() -> None:
        async with running(model, max_lora_rank=RANK) as pool:
            await _pauses(pool, model)
            await _profile(pool, tmp_path / "trace")
            await _adapters(pool, tensors, tmp_path / "adapters")
            await _weights(pool, tensors, tmp_path / "saved")
            assert pool.worker._keeper.restarts == 0

    asyncio.run(run())
