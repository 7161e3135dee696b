"""Weights replaced while requests run, with overlap scheduling and CUDA graphs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools.in_place import InPlaceEngine, Judge, check_crossing, greedy, prompts, until, write_versions

from rolloutmq.worker.sglang.engine import SGLangConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
RUNNING = 16
TOKENS = 400
TOLERANCE = 0.02
"""Of a log-probability: the engine computes in bfloat16, the reference in float32 on the same bfloat16 weights."""


async def _run(versions: list[Path], **config: Any) -> None:
    engine = InPlaceEngine(
        SGLangConfig(
            model=str(versions[0]),
            dtype="bfloat16",
            max_running=RUNNING,
            max_total_tokens=200_000,
            attention_backend="triton",
            sampling_backend="pytorch",
            prefill_cuda_graph=False,
            **config,
        )
    )
    await engine.start()
    try:
        await _crossing(engine, versions, Judge(versions, "cuda"))
    finally:
        await engine.close()


async def _crossing(engine: InPlaceEngine, versions: list[Path], judge: Judge) -> None:
    asked = prompts(RUNNING + 4)
    for prompt in asked[RUNNING:]:  # cached under version 0
        await engine.generate(greedy(prompt, 2, "0"))
    requests = [greedy(prompt, TOKENS, "0") for prompt in asked[:RUNNING]]
    requests += [greedy(prompt, 24, "0") for prompt in asked[RUNNING:]]  # these wait for a slot
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    last = requests[RUNNING - 1].request_id
    await until(lambda: (p := engine.progress(last)) is not None and len(p.token_ids) >= 50)
    first = await engine.replace(versions[1], "1")
    reached = first["counts"][last] + 51
    await until(lambda: (p := engine.progress(last)) is not None and len(p.token_ids) >= reached)
    second = await engine.replace(versions[2], "2")
    outputs = await asyncio.gather(*tasks)
    assert first["pending"] == second["pending"] == 1
    certain = 0
    for prompt, request, output in zip(asked[:RUNNING], requests, outputs, strict=False):
        a, b = (answer["counts"][request.request_id] for answer in (first, second))
        assert 50 <= a < b < TOKENS
        certain += check_crossing(judge, prompt, output, [(0, a), (1, b - a), (2, TOKENS - b)], TOLERANCE)
    assert certain >= RUNNING // 2
    assert first["waiting"] == [request.request_id for request in requests[RUNNING:]]
    for prompt, request, output in zip(asked[RUNNING:], requests[RUNNING:], outputs[RUNNING:], strict=True):
        assert first["counts"][request.request_id] == 0
        assert output.cached_tokens == 0
        assert judge.error(prompt, output, [(2, 24)]) < TOLERANCE
    for prompt in asked:  # whatever is cached of older weights is for nobody
        output = await engine.generate(greedy(prompt, 8, "2"))
        assert judge.error(prompt, output, [(2, 8)]) < TOLERANCE
        assert (output.cached_tokens > len(prompt) // 2) == (prompt in asked[RUNNING:])  # two may begin alike


def test_every_token_is_of_the_version_it_is_said_to_be_of(tmp_path: Path) -> None:
    asyncio.run(_run(write_versions(tmp_path, 3, dtype="bfloat16")))
