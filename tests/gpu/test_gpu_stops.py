"""Stops, least lengths, grammars and penalties with overlap scheduling and CUDA graphs, in one leg and in several."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.text_requests import EOS, in_legs, request, text_of

from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
SAID = "one two €uro; END of it"
PENALTIES: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2}


async def _run(model: Path) -> None:
    config = SGLangConfig(
        model=str(model),
        dtype="float16",  # SGLang's kernels on GPUs know no float32
        max_running=32,
        max_total_tokens=100_000,
        attention_backend="triton",
        sampling_backend="pytorch",
        prefill_cuda_graph=False,
    )
    engine = SGLangEngine(config)
    await engine.start()
    try:
        await _stops(engine)
        await _least(engine)
        await _penalties(engine)
    finally:
        await engine.close()


async def _stops(engine: SGLangEngine) -> None:
    for cuts in ((), (9,), (15,)):
        jobs = [in_legs(engine, request(regex=SAID, stop=(SAID[i : i + 3],)), *cuts) for i in range(12)]
        for i, output in enumerate(await asyncio.gather(*jobs)):
            assert (text_of(output.token_ids), output.matched_stop) == (SAID[: i + 3], SAID[i : i + 3])
        whole = await in_legs(engine, request(regex=SAID, stop_regex=("x",)), *cuts)
        assert (text_of(whole.token_ids), whole.matched_stop) == (SAID, EOS)


async def _least(engine: SGLangEngine) -> None:
    for cuts in ((), (3,), (8,)):
        jobs = [in_legs(engine, request(min_new_tokens=i, logit_bias={EOS: 90.0}), *cuts) for i in range(12)]
        assert [len(output.token_ids) for output in await asyncio.gather(*jobs)] == [i + 1 for i in range(12)]


async def _penalties(engine: SGLangEngine) -> None:
    """Every token is greedy under penalties on all tokens before it, told from its log-probability.

    A leg of one token has no batch before it, so nothing can come late: a sample in such legs is the measure.
    """
    asked = request(max_new_tokens=40, ignore_eos=True, **PENALTIES)
    exact = await in_legs(engine, asked, *range(1, 40))
    for cuts in ((), (1,), (17, 18)):
        output = await in_legs(engine, asked, *cuts)
        same = output.token_ids == exact.token_ids
        upto = len(same) if same.all() else int(same.argmin())  # from a near tie on they may differ
        assert upto > 10
        torch.testing.assert_close(
            torch.tensor(output.logprobs[:upto]), torch.tensor(exact.logprobs[:upto]), atol=3e-2, rtol=0
        )


def test_with_overlap_and_graphs(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", context=2048, dtype="float16")
    asyncio.run(_run(tmp_path / "model"))
