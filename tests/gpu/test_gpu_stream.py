"""Streamed requests on a GPU, where a step takes a millisecond: told step by step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pools.in_place import greedy, prompts

from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.engine.protocol import EngineRequest, Wanted
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
RUNNING = 256
TOKENS = 512


def requests(streamed: bool) -> list[EngineRequest]:
    plain = [greedy(prompt, TOKENS, "0") for prompt in prompts(RUNNING)]
    return [replace(one, wanted=Wanted(stream=True)) for one in plain] if streamed else plain


async def steps(engine: SGLangEngine) -> set[int]:
    """Lengths that are seen of one streamed request while it runs."""
    (one, *_) = requests(streamed=True)
    running = asyncio.create_task(engine.generate(one))
    seen: set[int] = set()
    while not running.done():
        if (progress := engine.progress(one.request_id)) is not None:
            seen.add(len(progress.token_ids))
            assert len(progress.logprobs) == len(progress.token_ids)
        await asyncio.sleep(0)
    output = await running
    assert max(seen) <= len(output.token_ids) == TOKENS
    return seen


async def _run(model: Path) -> None:
    config = SGLangConfig(
        model=str(model),
        dtype="bfloat16",
        max_running=RUNNING,
        max_total_tokens=400_000,
        attention_backend="triton",
        sampling_backend="pytorch",
        prefill_cuda_graph=False,
    )
    engine = SGLangEngine(config)
    await engine.start()
    try:
        assert len(await steps(engine)) > TOKENS // 4
        for streamed in (True, False):
            outputs = await asyncio.gather(*(engine.generate(one) for one in requests(streamed)))
            assert all(len(one.token_ids) == len(one.logprobs) == TOKENS for one in outputs)
    finally:
        await engine.close()


def test_streaming_is_told_step_by_step(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", context=2048)
    asyncio.run(_run(tmp_path / "model"))
