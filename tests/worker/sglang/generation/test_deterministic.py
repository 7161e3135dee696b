"""A deterministic engine with overlap scheduling, where a request's newest token is known one batch late.

Seeds, processors that must be right about their place all the same, and at last a whole pool with a weight update in
the middle of samples that ask for everything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from openai import OpenAI
from support.engines.asking import ask, judged, judged_states, processor
from support.engines.plan_models import assert_whole, compared
from support.engines.remote import Kept
from support.pools.in_place import Judge, prompts, until
from support.pools.pool import worker
from support.pools.served import gateway
from support.specimens.moe import check_routes, routes, same_routes, write_experts
from support.specimens.own_processors import OWN

from rolloutmq import (
    GenerateJob,
    JobFailed,
    LogprobOptions,
    RolloutClient,
    RolloutResult,
    SamplingParams,
    WeightPublisher,
)
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.engine.protocol import Wanted
from rolloutmq.worker.jobs.sample import sample_seed
from rolloutmq.worker.sglang import engine as engine_module
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.sglang.wire import sglang_request

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROMPT = [11, 23, 5, 301, 42, 7]
TOLERANCE = 2e-3
TOKENS = 800


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    return [write_experts(tmp_path_factory.mktemp("deterministic") / str(version), version) for version in range(2)]


@pytest.fixture(scope="module")
def judge(versions: list[Path]) -> Judge:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    judge = Judge(versions[:1])
    judge.models.append(AutoModelForCausalLM.from_pretrained(versions[1], dtype="float32").eval())
    return judge


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(versions: list[Path]) -> AsyncIterator[Kept]:
    config = SGLangConfig(
        model=str(versions[0]),
        dtype="float32",
        max_running=16,
        max_total_tokens=16384,
        overlap_schedule=True,
        deterministic=True,
        hidden_states=True,
        routed_experts=True,
        logit_processors=OWN,
        extra={"chunked_prefill_size": 256},
    )
    engine = Kept(config)
    await engine.start()
    yield engine
    await engine.end()


async def drawn(engine: SGLangEngine, seeds: list[int | None], count: int, **more: Any) -> list[list[int]]:
    """Tokens by each of the seeds, all in one batch."""
    prompt, sampling = more.pop("prompt", PROMPT), more
    requests = [ask(prompt, count, wanted=Wanted(seed=seed), **sampling) for seed in seeds]
    return [output.token_ids.tolist() for output in await asyncio.gather(*map(engine.generate, requests))]


async def test_a_seed_draws_the_same_alone_and_in_any_batch(engine: Kept) -> None:
    seeds: list[int | None] = [sample_seed(7, index) for index in range(4)]
    first = await drawn(engine, seeds, 40)
    assert len(set(map(tuple, first))) == 4
    assert await drawn(engine, seeds[2:3], 40) == first[2:3]
    mixed = await drawn(engine, [None, seeds[3], *range(9), seeds[0]], 40)
    assert [mixed[1], mixed[-1]] == [first[3], first[0]]
    other = ask(
        PROMPT, 40, wanted=Wanted(seed=1), top_k=5, top_p=0.9
    )  # SGLang samples by another way beside such a one
    beside, _ = await asyncio.gather(drawn(engine, seeds, 40), engine.generate(other))
    assert beside == first


async def test_without_a_seed_samples_differ(engine: Kept) -> None:
    """SGLang would give them all the same."""
    assert len(set(map(tuple, await drawn(engine, [None] * 6, 12)))) == 6


async def test_top_k_and_top_p_with_seeds(engine: Kept, judge: Judge) -> None:
    row = np.exp(judged(judge.models[0], PROMPT)[-1].astype(np.float64))
    order = np.argsort(-row)
    seeds: list[int | None] = [sample_seed(3, index) for index in range(400)]
    for sampling, kept in ({"top_k": 4}, 4), ({"top_p": 0.05}, int((np.cumsum(row[order]) - row[order] <= 0.05).sum())):
        first = np.array(await drawn(engine, seeds, 1, **sampling))[:, 0]
        assert set(first.tolist()) <= set(order[:kept].tolist())
        expected = 400 * row[order[:kept]] / row[order[:kept]].sum()
        counts = np.array([(first == token).sum() for token in order[:kept]])
        assert ((counts - expected) ** 2 / expected).sum() < 4 * kept
        assert np.array(await drawn(engine, seeds[5:6], 1, **sampling))[0, 0] == first[5]


async def test_a_resumed_leg_goes_on_as_the_uninterrupted_one(engine: Kept) -> None:
    seed, whole = 2**62 + 11, 60
    [straight] = await drawn(engine, [seed], whole)
    for cut in (1, 17, 59):
        so_far = ask([*PROMPT, *straight[:cut]], whole - cut, generated=cut, wanted=Wanted(seed=seed))
        assert (await engine.generate(so_far)).token_ids.tolist() == straight[cut:]


async def test_logprobs_are_the_same_to_the_last_bit(engine: Kept) -> None:
    """In a batch, alone, behind a prefix from the cache, in a prompt that is prefilled in parts, after a new leg."""
    rng = np.random.default_rng(8)
    given = [rng.integers(0, 320, length).tolist() for length in (3, 65, 300)]
    everyone = list(range(len(given)))

    async def generate(places: list[int], key: str, before: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        requests = []
        for i in places:
            done = len(before[i])
            prompt = [*given[i], *before[i]]
            requests.append(ask(prompt, 45 - done, generated=done, key=key, wanted=Wanted(seed=i)))
        outputs = await asyncio.gather(*map(engine.generate, requests))
        return [(output.token_ids.tolist(), output.logprobs.tolist()) for output in outputs]

    nothing: list[list[int]] = [[] for _ in given]
    whole = await generate(everyone, "together", nothing)
    for place in everyone:
        assert await generate([place], f"alone {place}", nothing) == [whole[place]]
    assert await generate(everyone, "together", nothing) == whole
    legs = await generate(everyone, "legs", [tokens[:17] for tokens, _ in whole])
    assert legs == [(tokens[17:], logprobs[17:]) for tokens, logprobs in whole]


async def test_min_p_cannot_be_had(engine: Kept) -> None:
    with pytest.raises(RequestRefused, match=r"sampling.min_p=0.1: 0 on a deterministic engine"):
        await engine.generate(ask(PROMPT, 4, wanted=Wanted(), min_p=0.1))
    assert "seed" in engine.info.features


@pytest.mark.slow
async def test_processors_know_their_place_though_tokens_come_late(engine: Kept) -> None:
    """Also with prompts that are prefilled in parts, while others decode."""
    long = np.random.default_rng(2).integers(0, 320, 1000).tolist()
    requests, expected = [], []
    for i in range(6):
        generated = 5 * (i % 2)
        prompt = [*(long if i == 3 else PROMPT), *[1] * generated]
        requests.append(
            ask(prompt, 150, generated=generated, wanted=Wanted(logit_processors=(processor("counter", offset=i),)))
        )
        expected.append(list(range(generated + i, generated + i + 150)))
    fresh = ask(PROMPT, 200, wanted=Wanted(logit_processors=(processor("fresh"),)))
    *counted, unique = await asyncio.gather(*map(engine.generate, [*requests, fresh]))
    assert [output.token_ids.tolist() for output in counted] == expected
    assert len({*PROMPT, *unique.token_ids.tolist()}) == len(PROMPT) + 200


@pytest.mark.slow
async def test_what_sglang_takes_back_and_prefills_again_goes_on_in_its_place(
    engine: Kept, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the states and logprobs of the tokens before and after."""
    retractions, output = [], engine_module.engine_output

    def noted(request: Any, answer: Any, shapes: Any) -> Any:
        retractions.append(answer["meta_info"]["num_retractions"])
        return output(request, answer, shapes)

    monkeypatch.setattr(engine_module, "engine_output", noted)
    manager = engine._run.manager
    rules = (
        (processor("counter", offset=1),),
        (processor("fresh"),),
        (processor("temperature_schedule", points=[[0, 1.0]]),),
    )
    wishes = {"logprobs": LogprobOptions(top=1), "hidden_states": "all"}
    requests = [ask(PROMPT, 250, wanted=Wanted(logit_processors=each, seed=9, **wishes)) for each in rules]
    straight = await asyncio.gather(*map(engine.generate, requests))
    again = [replace(request, request_id=f"{i:044x}") for i, request in enumerate(requests, 1 << 40)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in again]
    await until(lambda: [len(state.output_ids) >= 50 for state in manager.rid_to_state.values()] == [True] * 3)
    await manager.pause_generation(sglang_request("PauseGenerationReqInput", mode="retract"))
    await manager.continue_generation(sglang_request("ContinueGenerationReqInput"))
    outputs = await asyncio.gather(*tasks)
    assert retractions[-3:] == [1, 1, 1]
    assert outputs[0].token_ids.tolist() == list(range(1, 251))
    assert len({*PROMPT, *outputs[1].token_ids.tolist()}) == len(PROMPT) + 250
    for output, before in zip(outputs, straight, strict=True):
        assert output.token_ids.tolist() == before.token_ids.tolist()
        for name, rows in before.token_arrays.items():
            np.testing.assert_allclose(output.token_arrays[name], rows, atol=5e-3)


async def test_scaled_logprobs_and_states_with_overlap(engine: Kept, judge: Judge) -> None:
    options = LogprobOptions(token_ids=tuple(range(320)), kind="scaled", prompt=True)
    schedule = (processor("temperature_schedule", points=[[0, 0.5], [20, 2.0]]),)
    request = ask(
        PROMPT,
        25,
        wanted=Wanted(logprobs=options, logit_processors=schedule, hidden_states="all", seed=3),
        temperature=3,
    )
    output, *_ = await asyncio.gather(engine.generate(request), drawn(engine, [None] * 5, 40))
    tokens = [*PROMPT, *output.token_ids.tolist()]
    raw = judged(judge.models[0], tokens)[len(PROMPT) - 1 : -1]
    scaled = raw / np.interp(np.arange(25), [0, 20], [0.5, 2.0])[:, None]
    expected = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    np.testing.assert_allclose(output.token_arrays["id_logprobs"], expected, atol=TOLERANCE)
    prompt = judged(judge.models[0], PROMPT, 3.0)[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(output.arrays["prompt_logprobs"][1:], prompt, atol=TOLERANCE)
    states = judged_states(judge.models[0], tokens)[len(PROMPT) - 1 : -1]
    np.testing.assert_allclose(output.token_arrays["hidden_states"], states, atol=5e-3)


async def test_routed_experts_with_a_prefix_from_the_cache(engine: Kept, judge: Judge) -> None:
    prompt = np.random.default_rng(4).integers(0, 320, 100).tolist()
    for part in ((), (1, 2)):
        request = ask([*prompt, *part], 20, wanted=Wanted(routed_experts=True, seed=1))
        output, plain = await asyncio.gather(engine.generate(request), engine.generate(ask(prompt, 9, wanted=Wanted())))
        assert plain.token_arrays == plain.arrays == {}
        expected = routes(judge.models[0], [*request.token_ids.tolist(), *output.token_ids.tolist()])
        check_routes(output.token_arrays["routed_experts"], expected[request.token_ids.size - 1 : -1])
        check_routes(output.arrays["prompt_routed_experts"], expected[: request.token_ids.size])
    assert output.cached_tokens > 90


async def test_seeds_of_openais_client_through_a_gateway(engine: Kept, tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        async with worker(server.url, engine=engine, max_running=8):
            await asyncio.to_thread(check_seeds, server.url, tmp_path / "gateway.log")


def check_seeds(redis_url: str, log: Path) -> None:
    """This model has no tokenizer: ids go in, and ids come out."""
    with gateway(redis_url, log) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        asked = {"model": model.id, "prompt": PROMPT, "max_tokens": 16, "n": 2}

        def said(seed: int, **more: Any) -> list[list[int]]:
            extra = {"return_token_ids": True}
            answer: Any = client.completions.create(**asked, **more, seed=seed, extra_body=extra)
            parts = [part for chunk in answer for part in chunk.choices] if more else answer.choices
            return [[token for part in parts if part.index == n for token in part.token_ids] for n in range(2)]

        first, second = said(5)
        assert [len(first), len(second), first == second] == [16, 16, False]
        assert said(5) == said(5, stream=True) == [first, second] != said(6)


async def test_its_copy_plan_does_what_loading_does(engine: Kept, versions: list[Path], tmp_path: Path) -> None:
    """Of a mixture of experts; see weights/test_plan_models.py."""
    for version in (1, 0):  # and back
        weights = versions[version] / "model.safetensors"
        [found] = await compared(engine, weights, tmp_path / f"report-{version}")
        assert_whole(found, "Qwen3Moe", weights)


async def test_the_examples_of_the_documentation_run(engine: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[4] / "docs" / "logits.md").read_text()
    names: dict[str, Any] = {}
    with EmbeddedRedis() as server:
        monkeypatch.setenv("ROLLOUTMQ_REDIS", server.url)
        async with worker(server.url, engine=engine, max_running=8):
            try:
                for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
                    await asyncio.to_thread(exec, code, names)
            finally:
                await asyncio.to_thread(names["client"].close)
    assert len(names["again"]) == 2  # it came to the last one


def check_result(judge: Judge, prompt: list[int], result: RolloutResult) -> None:
    """Each row is of the weights that its segment names, each leg having computed everything before it anew."""
    count = result.token_ids.size
    assert count == TOKENS
    segments = [(segment.version, segment.tokens) for segment in result.segments]
    arrays, legs, start = result.token_arrays, [], 0
    for version, tokens in segments:
        fed = [*prompt, *result.token_ids[: start + tokens].tolist()]
        before = len(prompt) + start - 1
        states = judged_states(judge.models[version], fed)[before:-1]
        found = arrays["routed_experts"][start : start + tokens]
        legs.append((states, same_routes(found, judge.models[version], fed, before)))
        start += tokens
    states, same = map(np.concatenate, zip(*legs, strict=True))
    expected = judge.logprobs(prompt, result.token_ids, segments, keep=False)[same]
    rows = np.arange(len(expected))
    np.testing.assert_allclose(result.logprobs[same], expected[rows, result.token_ids[same]], atol=TOLERANCE)
    np.testing.assert_allclose(arrays["id_logprobs"][same], expected[:, [4, 100]], atol=TOLERANCE)
    best = np.sort(expected)[:, ::-1][:, :3]
    np.testing.assert_allclose(arrays["top_logprobs"][same], best, atol=TOLERANCE)
    ids = arrays["top_ids"][same].astype(int)
    np.testing.assert_allclose(np.take_along_axis(expected, ids, 1), best, atol=TOLERANCE)
    np.testing.assert_allclose(arrays["hidden_states"][same], states[same], atol=1e-2)
    check_routes(result.arrays["prompt_routed_experts"], routes(judge.models[segments[0][0]], prompt))
    first = judged(judge.models[segments[0][0]], prompt)[np.arange(len(prompt) - 1), prompt[1:]]
    assert result.arrays.keys() == {
        "prompt_routed_experts",
        "prompt_logprobs",
        "prompt_top_ids",
        "prompt_top_logprobs",
        "prompt_id_logprobs",
    }
    np.testing.assert_allclose(result.arrays["prompt_logprobs"], [np.nan, *first], atol=TOLERANCE)


@pytest.mark.slow
async def test_rows_join_over_a_weight_update_in_a_pool(engine: Kept, judge: Judge, versions: list[Path]) -> None:
    """Two samples of a seeded job with logprobs of all kinds, states, a processor; the weights change under them.

    Last of this file: the engine has other weights afterwards.
    """
    from safetensors.torch import load_file  # noqa: PLC0415

    [prompt] = prompts(1, length=20)
    job = GenerateJob(
        token_ids=prompt,
        n=2,
        sampling=SamplingParams(max_new_tokens=TOKENS, ignore_eos=True),
        logprobs=LogprobOptions(top=3, token_ids=(4, 100), prompt=True),
        hidden_states="all",
        routed_experts=True,
        logit_processors=(processor("temperature_schedule", points=[[0, 0.5], [TOKENS, 1.5]]),),
        seed=5,
    )
    with EmbeddedRedis() as server:
        publisher = await asyncio.to_thread(lambda: WeightPublisher(server.url, mode="resume"))
        try:
            async with worker(server.url, engine=engine, max_running=8), RolloutClient(server.url) as client:
                handle = await client.submit(job)
                states = engine._run.manager.rid_to_state
                await until(lambda: [len(state.output_ids) >= 50 for state in states.values()] == [True, True])
                report = await asyncio.to_thread(
                    lambda: publisher.publish(1, load_file(versions[1] / "model.safetensors")).wait(60)
                )
                assert (report.state, report.failures) == ("committed", {})
                results = await client.wait(handle, 120)
                unknown = GenerateJob(token_ids=prompt, logit_processors=(processor("softcap"),))
                with pytest.raises(
                    JobFailed, match=r"logit_processors\[0\].name='softcap': this worker has action_mask"
                ):
                    await client.wait(await client.submit(unknown), 60)
        finally:
            await asyncio.to_thread(publisher.close)
    assert [result.versions for result in results] == [(0, 1)] * 2
    assert results[0].token_ids.tolist() != results[1].token_ids.tolist()
    for result in results:
        check_result(judge, prompt, result)


async def test_the_hash_that_draws_is_murmur_hash_3(engine: Kept) -> None:
    """As SGLang's kernels have it: the four words of seed, position and column, and their 16 bytes."""
    import torch  # noqa: PLC0415

    from rolloutmq.worker.sglang.inside.cpu import murmur_hash32  # noqa: PLC0415

    def expected(words: list[int]) -> int:
        state = 0
        for word in words:
            block = word * 0xCC9E2D51 % 2**32
            block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
            state ^= block
            state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
        state ^= 16
        state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
        state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
        return state ^ state >> 16

    seeds, positions, columns = [1, 2**62 + 12345, 2**63 - 1], [0, 5, 70_000], [0, 1, 319, 151_935]
    found = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    assert found.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert found[row].tolist() == [expected([seed % 2**32, seed >> 32, position, column]) for column in columns]
