"""Logprobs, hidden states, logit processors and seeds on a GPU: overlap scheduling, CUDA graphs, bfloat16.

One GPU: `pytest tests/gpu/test_gpu_sampler.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import ask, judged, judged_states, processor
from support.pools.in_place import Judge, prompts, write_versions
from support.specimens.own_processors import OWN

from rolloutmq.messages.model.sampling import LogprobOptions
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Wanted
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
TOLERANCE = 0.05
"""Of a log-probability: the engine computes in bfloat16, the reference in float32 on the same bfloat16 values."""
IDS = (4, 100, 259)


def run(tmp_path: Path, test: Callable[[SGLangEngine, Any], Awaitable[None]], **config: Any) -> None:
    """`test(engine, model in transformers)` on an engine of its own."""
    versions = write_versions(tmp_path, 1, dtype="bfloat16")

    async def main() -> None:
        engine = SGLangEngine(
            SGLangConfig(
                model=str(versions[0]),
                dtype="bfloat16",
                max_running=64,
                max_total_tokens=200_000,
                attention_backend="triton",
                sampling_backend="pytorch",
                prefill_cuda_graph=False,
                logit_processors=OWN,
                **config,
            )
        )
        await engine.start()
        try:
            await test(engine, Judge(versions).models[0])
        finally:
            await engine.close()

    asyncio.run(main())


async def batch(engine: SGLangEngine, requests: list[EngineRequest]) -> list[EngineOutput]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def test_processors_are_right_about_their_place(tmp_path: Path) -> None:
    async def test(engine: SGLangEngine, model: Any) -> None:
        first, *_ = prompts(1, length=300)
        requests, expected = [], []
        for i in range(16):
            generated = 5 * (i % 2)
            wanted = Wanted(logit_processors=(processor("counter", offset=i),))
            requests.append(ask([*first[: 10 + 17 * i], *[1] * generated], 150, generated=generated, wanted=wanted))
            expected.append(list(range(i + generated, i + generated + 150)))
        fresh = ask(first[:20], 200, wanted=Wanted(logit_processors=(processor("fresh"),)))
        masked = ask(first, 50, wanted=Wanted(logit_processors=(processor("action_mask", token_ids=[5, 7]),)))
        plain = [ask(first, 150, wanted=Wanted()) for _ in range(4)]
        outputs = await batch(engine, [*requests, fresh, masked, *plain])
        assert [output.token_ids.tolist() for output in outputs[:16]] == expected
        assert len({*first[:20], *outputs[16].token_ids.tolist()}) == len({*first[:20]}) + 200
        assert set(outputs[17].token_ids.tolist()) == {5, 7}

    run(tmp_path, test)


def test_logprobs_of_all_kinds_in_one_batch(tmp_path: Path) -> None:
    """With somebody who asks for none of some tokens, which 0.5.17 by itself does not survive."""
    options = [
        LogprobOptions(top=3),
        LogprobOptions(token_ids=IDS),
        LogprobOptions(prompt=True, top=2, token_ids=IDS),
        LogprobOptions(prompt=True, top=2, token_ids=IDS, kind="scaled"),
        LogprobOptions(),
    ]

    async def test(engine: SGLangEngine, model: Any) -> None:
        (prompt,) = prompts(1, length=40)
        requests = [ask(prompt, 40, wanted=Wanted(logprobs=each), temperature=0.6) for each in options]
        for request, output in zip(requests, await batch(engine, requests), strict=True):
            asked = request.wanted.logprobs
            tokens = [*prompt, *output.token_ids.tolist()]
            rows = judged(model, tokens, 0.6 if asked.kind == "scaled" else 1.0)
            own, of_prompt = rows[39:-1], rows[:39]
            np.testing.assert_allclose(output.logprobs, own[np.arange(40), output.token_ids], atol=TOLERANCE)
            if asked.top:
                best = np.sort(own)[:, ::-1][:, : asked.top]
                np.testing.assert_allclose(output.token_arrays["top_logprobs"], best, atol=TOLERANCE)
            if asked.token_ids:
                np.testing.assert_allclose(output.token_arrays["id_logprobs"], own[:, list(IDS)], atol=TOLERANCE)
            if asked.prompt:
                expected = of_prompt[np.arange(39), prompt[1:]]
                np.testing.assert_allclose(output.arrays["prompt_logprobs"][1:], expected, atol=TOLERANCE)
                ids = output.arrays["prompt_id_logprobs"]
                np.testing.assert_allclose(ids[1:], of_prompt[:, list(IDS)], atol=TOLERANCE)

    run(tmp_path, test)


def test_hidden_states_are_those_that_the_logits_were_made_of(tmp_path: Path) -> None:
    async def test(engine: SGLangEngine, model: Any) -> None:
        (prompt,) = prompts(1, length=40)
        wanted = [Wanted(hidden_states="all"), Wanted(hidden_states="last"), Wanted()]
        requests = [ask(prompt, 30, wanted=each) for each in wanted]
        every, last, none = await batch(engine, requests)
        assert none.token_arrays == none.arrays == {}
        for output, packed in ((every, every.token_arrays["hidden_states"]), (last, last.arrays["last_hidden_state"])):
            assert packed.dtype == np.uint16
            states = (packed.astype(np.uint32) << 16).view(np.float32)
            expected = judged_states(model, [*prompt, *output.token_ids.tolist()])[39:-1]
            expected = expected if output is every else expected[-1]
            assert states.shape == expected.shape
            assert np.abs(states - expected).max() < 0.05 * np.abs(expected).max()

    run(tmp_path, test, hidden_states=True)


def test_seeds_on_a_deterministic_engine(tmp_path: Path) -> None:
    """Bit by bit, whatever else is in the batch, and when a sample goes on in another request."""

    async def test(engine: SGLangEngine, model: Any) -> None:
        (prompt,) = prompts(1, length=40)
        seeded = [ask(prompt, 100, wanted=Wanted(seed=seed)) for seed in range(8)]
        first = await batch(engine, seeded)
        assert len({tuple(output.token_ids.tolist()) for output in first}) == 8
        others = [ask(each, 60, wanted=Wanted(), top_k=20, top_p=0.9) for each in prompts(40, length=90, seed=1)]
        again = ask(prompt, 100, wanted=Wanted(seed=3))
        resumed = ask([*prompt, *first[3].token_ids[:33].tolist()], 67, generated=33, wanted=Wanted(seed=3))
        (alone,) = await batch(engine, [ask(prompt, 100, wanted=Wanted(seed=3))])
        beside, rest, *_ = await batch(engine, [again, resumed, *others])
        assert alone.token_ids.tolist() == beside.token_ids.tolist() == first[3].token_ids.tolist()
        assert alone.logprobs.tolist() == beside.logprobs.tolist() == first[3].logprobs.tolist()
        assert rest.token_ids.tolist() == first[3].token_ids[33:].tolist()
        turn = [*prompt, *first[3].token_ids.tolist(), 7, 8, 9]  # a session's next turn
        (warm,) = await batch(engine, [ask(turn, 20, wanted=Wanted(seed=3))])
        await engine.operate("flush_cache", {})
        (cold,) = await batch(engine, [ask(turn, 20, wanted=Wanted(seed=3))])
        assert warm.logprobs.tolist() == cold.logprobs.tolist()

    run(tmp_path, test, deterministic=True)
