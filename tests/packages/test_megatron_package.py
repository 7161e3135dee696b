"""Megatron-Core 0.16.1 itself, cut over two ranks: what it computes is what the model computes that a worker receives.

On a CPU, by gloo and without Transformer Engine. The judge is transformers with the published tensors.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from support.peers import megatron_trainer
from support.peers.megatron_trainer import SHAPE, TOKENS, VOCABULARY
from support.pools.pool import eventually, worker

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed: make test-trainers", allow_module_level=True)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
async def test_logits_are_those_of_the_published_tensors(kind: str, redis_db: str, tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415

    name = kind.capitalize()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        num_hidden_layers=SHAPE["layers"],
        num_key_value_heads=2,
        tie_word_embeddings=kind == "qwen2",
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        **{field: value for field, value in SHAPE.items() if field != "layers"},
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ranks = ("-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    async with worker(redis_db) as one:
        trainer = await asyncio.create_subprocess_exec(
            sys.executable, *ranks, megatron_trainer.__file__, str(tmp_path), redis_db, kind
        )
        assert await asyncio.wait_for(trainer.wait(), 240) == 0
        await eventually(lambda: one.generation.version == 1, what="the version")
        missing, strange = model.load_state_dict(dict(one.engine.weights), strict=False)
    assert (missing, strange) == (["lm_head.weight"] if kind == "qwen2" else [], [])
    model.tie_weights()
    expected = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        found = model(torch.tensor([TOKENS])).logits[0]
    assert found.shape == expected.shape
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
