"""What VERL's SGLang guide shows in code, and the quick starts of both guides, on real SGLang."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.engines.asking import judged
from support.engines.remote import RemoteEngine
from support.pools.operations import until

from rolloutmq import BlockingRolloutClient, GenerateJob, RolloutClient, RolloutResult, SamplingParams, job_fields
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.ops.tiny_model import load_tiny_model
from rolloutmq.producer.data import Turn, response_mask
from rolloutmq.worker.text.tokenizer import ModelTokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
TEXTS = ["What is 2+2?", "Explain quantum computing", "Write a haiku about coding"]
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)
FOLDER = Path(__file__).resolve().parents[4] / "examples" / "gsm8k"


@pytest.fixture(scope="module")
def redis_url(text_engine: RemoteEngine) -> Iterator[str]:
    with EmbeddedRedis() as server, text_engine.worker(server.url):
        yield server.url


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_url) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer(text_model: Path) -> ModelTokenizer:
    return ModelTokenizer(str(text_model))


@pytest.fixture(scope="module")
def model(text_model: Path) -> Any:
    return load_tiny_model(text_model).eval()


def distributions(model: Any, result: RolloutResult, temperature: float = 1.0) -> npt.NDArray[np.float32]:
    """(t, vocabulary) log-probabilities of each answered place, as transformers has them."""
    rows = judged(model, [*result.prompt_ids.tolist(), *result.token_ids.tolist()], temperature)
    return rows[len(result.prompt_ids) - 1 : -1]


def assert_greedy(model: Any, result: RolloutResult) -> None:
    rows = distributions(model, result)
    np.testing.assert_allclose(rows[np.arange(len(rows)), result.token_ids], rows.max(-1), atol=1e-3)


def test_a_prompt_and_a_batch_of_texts(redis_url: str, tokenizer: ModelTokenizer, model: Any) -> None:
    """Basic usage, and token in, token out: the engine gets the ids of a text, and its ids are the answer's text."""
    with BlockingRolloutClient(redis_url) as client:
        (alone,) = client.generate(TEXTS[:1], GREEDY, timeout=60)
        batch = client.generate(TEXTS, GREEDY, timeout=60)
        ids = client.generate([tokenizer.encode(text) for text in TEXTS], GREEDY, timeout=60)
    for text, said, also in zip(TEXTS, batch, ids, strict=True):
        ((result,), (from_ids,)) = said.results, also.results
        assert result.prompt_ids.tolist() == tokenizer.encode(text).tolist() == from_ids.prompt_ids.tolist()
        assert result.text == tokenizer.decode(result.token_ids)
        assert from_ids.text is None
        assert_greedy(model, result)
        assert_greedy(model, from_ids)
    assert alone.results[0].prompt_ids.tolist() == batch[0].results[0].prompt_ids.tolist()


async def test_custom_sampling(client: RolloutClient, model: Any) -> None:
    """Every token is one of the likeliest that have 95% together, at that temperature."""
    fields = job_fields({"temperature": 0.8, "top_p": 0.95, "max_tokens": 40}, "verl")
    (group,) = await client.generate(["Creative story about AI"], n=16, timeout=60, **fields)
    ranks = []
    for result in group.results:
        assert 1 <= len(result.token_ids) <= 40
        rows = np.exp(distributions(model, result, 0.8))
        chosen = rows[np.arange(len(rows)), result.token_ids][:, None]
        assert np.where(rows > chosen, rows, 0.0).sum(-1).max() < 0.95 + 1e-3
        ranks += (rows > chosen).sum(-1).tolist()
    assert len(set(ranks)) > 40, "it samples"


async def test_a_conversation(client: RolloutClient, tokenizer: ModelTokenizer, model: Any) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi there! How can I help?"},
        {"role": "user", "content": "What's the weather like?"},
    ]
    (group,) = await client.generate([messages], GREEDY, timeout=60)
    rendered = "".join(f"<|im_start|>{it['role']}\n{it['content']}<|im_end|>\n" for it in messages)
    (result,) = group.results
    assert result.prompt_ids.tolist() == tokenizer.encode(f"{rendered}<|im_start|>assistant\n").tolist()
    assert_greedy(model, result)


async def test_token_ids_and_the_response_mask(client: RolloutClient) -> None:
    """Of one answer the mask is 1 throughout; of several turns it is 0 where the user speaks."""
    (group,) = await client.generate(["Hello world"], GREEDY, timeout=60)
    (result,) = group.results
    turns = [Turn(len(result.prompt_ids), False), Turn(len(result.token_ids), True)]
    assert response_mask(turns).tolist() == [1] * len(result.token_ids)
    async with client.session(sampling=GREEDY) as session:
        first, second = await session.generate("Hello world"), await session.generate("And more")
        ids, mask = session.token_ids, session.mask
    said = [*first.token_ids.tolist(), *second.token_ids.tolist()]
    assert ids[mask == 1].tolist() == said
    between = len(ids) - len(first.prompt_ids) - len(said)
    expected = [1] * len(first.token_ids) + [0] * between + [1] * len(second.token_ids)
    assert mask[len(first.prompt_ids) :].tolist() == expected
    assert between >= len("And more")


async def test_a_hundred_prompts_at_once(client: RolloutClient) -> None:
    """Each is a request of its own: results come as they complete, and `gather` puts them in the prompts' order."""

    def job(number: int) -> GenerateJob:
        sampling = SamplingParams(max_new_tokens=400 if number == 0 else 1 + number % 7, ignore_eos=True)
        return GenerateJob(token_ids=[3 + number, 20, 30], sampling=sampling)

    came: list[int] = []

    async def answer(number: int) -> RolloutResult:
        (result,) = await (await client.submit(job(number))).result(timeout=120)
        came.append(number)
        return result

    results = await asyncio.gather(*map(answer, range(100)))
    assert [int(result.prompt_ids[0]) for result in results] == list(range(3, 103))
    assert [len(result.token_ids) for result in results] == [400, *(1 + number % 7 for number in range(1, 100))]
    assert sorted(came) == list(range(100))
    assert came.index(0) > came.index(1), "a short answer waits for no long one"


async def test_masks_hold_on_word_problems(
    client: RolloutClient, tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only tokens are those of numbers, or all others: of each problem, as it is rendered."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from problems import problems  # noqa: PLC0415 – beside the tools

    prompts = [row["prompt"] for row in problems(30)]
    numbers = set(tokenizer.encode("0123456789").tolist())
    for name, inside in (("action_mask", True), ("disallowed_tokens", False)):
        fields = job_fields({name: sorted(numbers), "max_tokens": 40, "ignore_eos": True})
        groups = await client.generate(prompts, n=2, timeout=120, **fields)
        said = {token for group in groups for result in group.results for token in result.token_ids.tolist()}
        assert said <= numbers if inside else not said & numbers
        assert len(said) > 8, "it samples"


def test_the_quick_start(redis_url: str, text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of GRPO on problems made here: calls of the tool are scored, and each step samples with its weights."""
    for name, value in {"ROLLOUTMQ_REDIS": redis_url, "MODEL": str(text_model), "STEPS": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(FOLDER))
    names = runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    played, batch, advantages, last = (names[it] for it in ("played", "batch", "advantages", "version"))
    assert {(it.number, it.sample) for it in played} == {(task, one) for task in range(4) for one in range(8)}
    calls = 0
    for episode in played:
        assert (episode.error, episode.stop in ("done", "turns")) == (None, True)
        truth = int(episode.task["reward_model"]["ground_truth"])
        for turn in episode.turns:
            assert turn.result.versions == (last,)
            outcomes = turn.info.get("outcomes", ())
            calls += len(outcomes)
            if outcomes:
                right = int(turn.result.tool_calls[0].arguments["answer"]) == truth
                assert (outcomes[0].state_reward, turn.reward) == ((1.0, 0.0) if right else (0.0, -0.05))
            else:
                assert turn.reward == float(turn.result.text.removesuffix("<|im_end|>") == f"#### {truth}")
    assert calls > 0
    assert batch.rewards.tolist() == pytest.approx([it.reward for it in played])
    for group in range(4):
        assert float(advantages[batch.groups == group].mean()) == pytest.approx(0.0, abs=1e-4)
    assert set(batch.versions[batch.mask == 1].tolist()) == {last}
    with BlockingRolloutClient(redis_url) as client:
        until(lambda: [it.version for it in client.workers()] == [last + 1])  # the last step's weights serve
