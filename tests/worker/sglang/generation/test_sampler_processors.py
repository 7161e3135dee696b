"""Logit processors on real SGLang: exact distributions, exact places in a sample, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support.engines.asking import ask, judged, processor

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.sampling import LogitProcessor, LogprobOptions
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest, Wanted
from rolloutmq.worker.logit_processors import known_processors
from rolloutmq.worker.sglang.engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = [11, 23, 5, 301, 42, 7]
TOLERANCE = 2e-3
VOCABULARY = tuple(range(512))
ALL = LogprobOptions(token_ids=VOCABULARY)
MASK = (3, 44, 200, 511)


def own(model: Any, request: EngineRequest, output: EngineOutput, temperature: float = 1.0) -> Any:
    """(new tokens, vocabulary): what the model alone says of each."""
    rows = judged(model, [*request.token_ids.tolist(), *output.token_ids.tolist()], temperature)
    return rows[request.token_ids.size - 1 : -1]


def only(rows: Any, allowed: Any) -> Any:
    """Those distributions with nothing but `allowed` (a mask, or token ids) in them."""
    masked = np.full_like(rows, -np.inf)
    masked[..., allowed] = rows[..., allowed]
    return masked - np.log(np.exp(masked.astype(np.float64)).sum(-1, keepdims=True))


async def run(engine: SGLangEngine, processors: list[tuple[LogitProcessor, ...]], count: int, **more: Any) -> Any:
    """All in one batch, with the logprob of every token of the vocabulary at every place."""
    wanted = [Wanted(logprobs=more.get("logprobs", ALL), logit_processors=each) for each in processors]
    prompt, generated = more.get("prompt", PROMPT), more.get("generated", 0)
    requests = [ask(prompt, count, generated=generated, wanted=each, **more.get("sampling", {})) for each in wanted]
    return list(zip(requests, await asyncio.gather(*map(engine.generate, requests)), strict=True))


async def test_different_masks_in_one_batch(engine: SGLangEngine, reference: Any) -> None:
    masks = [
        (processor("action_mask", token_ids=list(MASK)),),
        (),
        (processor("disallowed_tokens", token_ids=list(range(5, 512))),),
        (processor("disallowed_tokens", token_ids=[3]), processor("action_mask", token_ids=list(MASK))),
        (processor("action_mask", token_ids=[9]),),
    ]
    allowed = [MASK, VOCABULARY, range(5), MASK[1:], [9]]
    for may, (request, output) in zip(allowed, await run(engine, masks, 10), strict=True):
        expected = only(own(reference, request, output), list(may))
        np.testing.assert_allclose(output.token_arrays["id_logprobs"], expected, atol=TOLERANCE)
        np.testing.assert_allclose(output.logprobs, expected[np.arange(10), output.token_ids], atol=TOLERANCE)
        assert set(output.token_ids.tolist()) <= set(may)


@pytest.mark.slow
async def test_the_tokens_that_come_are_of_that_distribution(engine: SGLangEngine, reference: Any) -> None:
    """Pearson's chi-square over 2,000 first tokens; the seed of the engine's process is fixed."""
    counts, draws, temperature = np.zeros(512), 2000, 2.0
    mask = (processor("action_mask", token_ids=list(MASK)),)
    for _ in range(draws // 250):
        for _, output in await run(
            engine, [mask] * 250, 1, logprobs=LogprobOptions(), sampling={"temperature": temperature}
        ):
            counts[output.token_ids[0]] += 1
    row = judged(reference, PROMPT, temperature)[-1]
    expected = draws * np.exp(only(row, list(MASK)))
    assert counts.sum() == counts[list(MASK)].sum() == draws
    statistic = ((counts - expected)[list(MASK)] ** 2 / expected[list(MASK)]).sum()
    assert statistic < 16.3  # 3 degrees of freedom: 1 in 1,000
    # The other temperature would be found out with as many draws.
    other = draws * np.exp(only(judged(reference, PROMPT, 0.3)[-1], list(MASK)))
    assert ((counts - other)[list(MASK)] ** 2 / other[list(MASK)]).sum() > 100


async def test_temperature_schedule(engine: SGLangEngine, reference: Any) -> None:
    """Of the whole sample, over legs; seen in the logprobs after temperature, while raw ones stay the model's own."""
    points = [[2, 0.5], [6, 2.5], [9, 1.0]]
    linear = (processor("temperature_schedule", points=points),)
    step = (processor("temperature_schedule", points=points, shape="step"),)
    scaled = LogprobOptions(token_ids=VOCABULARY, kind="scaled")
    for generated in (0, 4):
        place = np.arange(generated, generated + 10)
        temperatures = [
            np.interp(place, *np.transpose(points)),
            np.select([place < 6, place < 9], [0.5, 2.5], 1.0),
            np.full(10, 0.7),
        ]
        prompt = [*PROMPT, *range(100, 100 + generated)]
        for kind in (scaled, ALL):
            asked = {"prompt": prompt, "generated": generated, "logprobs": kind, "sampling": {"temperature": 0.7}}
            found = await run(engine, [linear, step, ()], 10, **asked)
            for each, (request, output) in zip(temperatures, found, strict=True):
                rows = own(reference, request, output)
                if kind is scaled:
                    rows = rows / each[:, None]
                np.testing.assert_allclose(output.token_arrays["id_logprobs"], only(rows, slice(None)), atol=TOLERANCE)


async def test_a_schedule_decides_what_is_drawn(engine: SGLangEngine) -> None:
    """Nearly greedy, then nearly uniform."""
    schedule = (processor("temperature_schedule", points=[[0, 1e-4], [12, 100.0]], shape="step"),)
    [(_, greedy)] = await run(engine, [()], 12, sampling={"temperature": 0.0})
    outputs = [output.token_ids.tolist() for _, output in await run(engine, [schedule] * 4, 24)]
    assert [tokens[:12] for tokens in outputs] == [greedy.token_ids.tolist()] * 4
    assert len({tuple(tokens[12:]) for tokens in outputs}) == 4


async def test_min_new_tokens_by_tokens(engine: SGLangEngine, reference: Any) -> None:
    barred = list(range(256))
    rule = (processor("min_new_tokens", min_new_tokens=7, token_ids=barred),)
    for generated in (0, 4, 7):
        [(request, output)] = await run(engine, [rule], 9, prompt=[*PROMPT, *[1] * generated], generated=generated)
        rows = own(reference, request, output)
        early = max(0, 7 - generated)
        expected = np.concatenate([only(rows[:early], slice(256, None)), rows[early:]])
        np.testing.assert_allclose(output.token_arrays["id_logprobs"], expected, atol=TOLERANCE)


async def test_dictated_tokens_are_sampled_and_those_behind_them_are_free(engine: SGLangEngine, reference: Any) -> None:
    """Of several lengths in one batch, over two legs."""
    lists = [[7, 300, 7], [5] * 8, [250]]
    for generated in (0, 2):
        rules = [(processor("forced_tokens", token_ids=ids),) for ids in lists]
        prompt = [*PROMPT, *[1] * generated]
        found = await run(engine, [*rules, ()], 6, prompt=prompt, generated=generated, sampling={"temperature": 0.0})
        for ids, (request, output) in zip([*lists, []], found, strict=True):
            tokens, dictated = output.token_ids.tolist(), ids[generated:][:6]
            assert tokens[: len(dictated)] == dictated
            free = own(reference, request, output)[len(dictated) :]
            assert tokens[len(dictated) :] == free.argmax(-1).tolist()


async def test_a_processor_of_ones_own_knows_its_place_and_its_tokens(engine: SGLangEngine) -> None:
    counters = [(processor("counter", offset=offset),) for offset in (0, 50, 100)]
    fresh = (processor("fresh"),)
    for generated in (0, 3):
        prompt = [*PROMPT, *range(400, 400 + generated)]
        found = await run(
            engine, [*counters, fresh, ()], 60, prompt=prompt, generated=generated, logprobs=LogprobOptions()
        )
        for offset, (_, output) in zip((0, 50, 100), found, strict=False):
            assert output.token_ids.tolist() == list(range(offset + generated, offset + generated + 60))
        tokens = [*prompt, *found[3][1].token_ids.tolist()]
        assert len(set(tokens)) == len(tokens)
        assert len(set(found[4][1].token_ids.tolist())) < 60  # as it would be by itself


async def test_a_failure_is_of_its_job_alone(engine: SGLangEngine) -> None:
    nothing_left = (processor("action_mask", token_ids=[3]), processor("disallowed_tokens", token_ids=[3]))
    broken, sound = (processor("broken", at=5),), (processor("broken", at=99),)
    requests = [ask(PROMPT, 12, wanted=Wanted(logit_processors=each)) for each in (nothing_left, broken, (), sound)]
    lost, failed, fine, same_processor = await asyncio.gather(*map(engine.generate, requests), return_exceptions=True)
    assert isinstance(lost, RequestRefused)
    assert "(action_mask, disallowed_tokens): failed, or left no token to choose from, at token 0" in str(lost)
    assert isinstance(failed, RequestRefused)
    assert "(broken): failed, or left no token to choose from, at token 5" in str(failed)
    assert isinstance(fine, EngineOutput)
    assert isinstance(same_processor, EngineOutput)  # which it was called with together
    assert len(same_processor.token_ids) == len(fine.token_ids) == 12
    assert fine.token_ids.size == 12


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (processor("softcap"), r"logit_processors\[0\].name='softcap': this worker has action_mask, broken, counter, "),
        (processor("action_mask"), r"logit_processors\[0\] action_mask: token_ids=None: a list of token ids"),
        (processor("action_mask", token_ids=[512]), "token_ids=512: token ids of this model are 0 to 511"),
        (processor("action_mask", tokens=[1]), "tokens=.*: no such parameter; there are token_ids"),
        (
            processor("disallowed_tokens", token_ids=list(VOCABULARY)),
            "at least one token of the vocabulary must be left",
        ),
        (processor("temperature_schedule", points=[[0, 0.0]]), "points=.*: pairs: tokens generated"),
        (processor("temperature_schedule", points=[[4, 1.0], [4, 2.0]]), "points=.*: in order of tokens generated"),
        (processor("temperature_schedule", points=[[0, 1.0]], shape="cubic"), "shape='cubic': one of linear, step"),
        (processor("min_new_tokens", min_new_tokens=-1, token_ids=[1]), "min_new_tokens=-1: a number of tokens"),
        (processor("counter", offset="far"), "offset='far': a number"),
        (processor("fresh", what=b"x"), "params=.*: what JSON can say"),
    ],
)
async def test_refused_with_the_reason(engine: SGLangEngine, asked: LogitProcessor, text: str) -> None:
    with pytest.raises(RequestRefused, match=text):
        await engine.generate(ask(PROMPT, 4, wanted=Wanted(logit_processors=(asked,))))


async def test_a_worker_says_which_it_has(engine: SGLangEngine) -> None:
    names = known_processors(engine.config.logit_processors)
    assert names == [
        "action_mask",
        "broken",
        "counter",
        "disallowed_tokens",
        "forced_tokens",
        "fresh",
        "min_new_tokens",
        "temperature_schedule",
    ]
    assert {f"logit_processors:{name}" for name in names} | {"logit_processors"} <= engine.info.features
