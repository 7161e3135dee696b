"""Which experts tokens went to, on a GPU with overlap scheduling and CUDA graphs, and experts spread over two GPUs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.engines.asking import ask
from support.pools.gpu import PROMPT, TOLERANCE, running
from support.pools.in_place import Judge
from support.specimens.moe import check_routes, routes, write_experts

from rolloutmq.worker.engine.protocol import Wanted
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
SHARE = 0.97
"""The engine computes in bfloat16, the reference in float32 on the same values: of two near experts either may come."""


def test_routed_experts_over_two_legs(tmp_path: Path) -> None:
    model = write_experts(tmp_path / "model", 0, dtype="bfloat16")

    async def main() -> None:
        engine = SGLangEngine(
            SGLangConfig(
                model=str(model),
                dtype="bfloat16",
                max_running=16,
                max_total_tokens=50_000,
                attention_backend="triton",
                sampling_backend="pytorch",
                prefill_cuda_graph=False,
                routed_experts=True,
            )
        )
        await engine.start()
        try:
            reference = Judge([model]).models[0]
            prompt = np.random.default_rng(0).integers(0, 320, 100).tolist()
            requests = [ask([*prompt, i], 60, wanted=Wanted(routed_experts=True)) for i in range(8)]
            plain = [ask([*prompt, i], 40, wanted=Wanted()) for i in range(8)]
            outputs = await asyncio.gather(*map(engine.generate, [*requests, *plain]))
            for request, output in zip(requests, outputs, strict=False):
                tokens = [*request.token_ids.tolist(), *output.token_ids.tolist()]
                expected = routes(reference, tokens)
                check_routes(output.token_arrays["routed_experts"], expected[100:-1], SHARE)
                check_routes(output.arrays["prompt_routed_experts"], expected[:101], SHARE)
                more = ask(tokens, 20, generated=60, wanted=Wanted(routed_experts=True, prompt=False))
                found = await engine.generate(more)
                expected = routes(reference, [*tokens, *found.token_ids.tolist()])
                check_routes(found.token_arrays["routed_experts"], expected[160:-1], SHARE)
                assert found.arrays == {}
            for output in outputs[8:]:
                assert output.token_arrays == output.arrays == {}
        finally:
            await engine.close()

    asyncio.run(main())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_experts_that_are_spread_over_two_gpus_before_and_after_an_update(tmp_path: Path) -> None:
    old, new = (write_experts(tmp_path / f"model-{seed}", seed, dtype="bfloat16") for seed in (0, 1))
    weights = new / "model.safetensors"
    # Not what is looked at here, and one of them takes minutes to compile.
    plain = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}

    async def main() -> None:
        async with running(old, tp_size=2, ep_size=2, extra=plain) as pool:
            before = await pool.generate(60)
            report = await asyncio.to_thread(pool.source.publish(1, load_file(weights)).wait, 60.0)
            assert report.state == "committed"
            after = await pool.generate(60)
        judge = Judge([old, new], "cuda")
        for version, result in enumerate((before, after)):
            assert result.versions == (version,)
            near = []
            for each in (version, 1 - version):
                expected = judge.logprobs(PROMPT, result.token_ids, [(each, len(result.token_ids))])
                chosen = expected[np.arange(len(result.token_ids)), result.token_ids]
                near.append(float((np.abs(result.logprobs - chosen) < TOLERANCE).mean()))
            # A token that went to the other of two near experts has another log-probability.
            assert near[0] > 0.85
            assert near[1] < 0.5

    asyncio.run(main())
