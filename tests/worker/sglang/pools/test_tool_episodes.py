"""Episodes with tools on real SGLang: what the model samples is a call by a grammar, and goes the whole way."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.remote import RemoteEngine

from rolloutmq import Episode, EpisodeLimits, RolloutClient, SamplingParams
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.data import ToolRegistry
from rolloutmq.producer.episodes import ToolEnvironment
from rolloutmq.worker.text.tokenizer import ModelTokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
DIGITS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
PROMPT = [{"role": "user", "content": "How much is it?"}]


def calling(name: str) -> str:
    """A grammar of one call, with arguments of the model's choice."""
    return rf'<tool_call>\n\{{"name": "{name}", "arguments": \{{"a": [0-9], "b": [0-9]\}}\}}\n</tool_call>'


@pytest.fixture(scope="module")
def redis_url(text_engine: RemoteEngine) -> Iterator[str]:
    with EmbeddedRedis() as server, text_engine.worker(server.url):
        yield server.url


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_url) as opened:
        yield opened


async def play(client: RolloutClient, grammar: str, timeout: float = 60.0) -> list[Episode]:
    """Episodes of two turns at most, whose answers are all of that grammar."""
    registry = ToolRegistry()
    registry.add(described("add"), lambda a, b: str(a + b))
    registry.add(described("wait"), wait)
    episodes = client.episodes(
        range(4),
        lambda _: ToolEnvironment(PROMPT, registry, score=lambda answer: len(answer.text), timeout=timeout),
        limits=EpisodeLimits(turns=2),
        sampling=SamplingParams(max_new_tokens=200, regex=grammar),
        tools=registry.tools,
        tool_parser="json",
    )
    return [episode async for episode in episodes]


def described(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": DIGITS}}


async def wait(a: int, b: int) -> None:
    await asyncio.Event().wait()


def check_tokens(episode: Episode, grammar: str, text_model: Path) -> None:
    """Its row is what was sampled and what the template makes of the observations, and nothing else."""
    tokenizer = ModelTokenizer(str(text_model))
    (row,) = episode.rows()
    text = f"<|im_start|>user\n{PROMPT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    expected = [tokenizer.encode(text).tolist()]
    for turn in episode.turns:
        said = turn.result
        assert said.prompt_ids.tolist() == [token for part in expected for token in part]
        expected.append(said.token_ids.tolist())
        assert re.fullmatch(grammar, tokenizer.decode(said.token_ids))
        outcomes = turn.info.get("outcomes", ())
        rendered = "".join(f"<|im_start|>tool\n{it.content}<|im_end|>\n" for it in outcomes)
        expected.append(tokenizer.encode(f"\n{rendered}<|im_start|>assistant\n").tolist())
    assert row.ids.tolist() == [token for part in expected[:-1] for token in part]
    sampled = np.concatenate([turn.result.token_ids for turn in episode.turns])
    assert row.ids[row.mask == 1].tolist() == sampled.tolist()


async def test_calls_run_and_their_answers_are_the_next_prompt(client: RolloutClient, text_model: Path) -> None:
    for episode in await play(client, calling("add")):
        assert (episode.stop, len(episode.turns)) == ("turns", 2)
        for turn in episode.turns:
            (call,) = turn.result.tool_calls
            (outcome,) = turn.info["outcomes"]
            assert call.valid
            assert outcome.content == str(call.arguments["a"] + call.arguments["b"])
        check_tokens(episode, calling("add"), text_model)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (calling("subtract"), "subtract"),
        (r'<tool_call>\n\{"name": "add", "argu [0-9]\n</tool_call>', "Error: "),
        (calling("wait"), "Error: wait did not answer within 0.1 s"),
    ],
    ids=["no such tool", "no JSON", "late"],
)
async def test_calls_that_fail_are_answered_with_the_error(
    client: RolloutClient, text_model: Path, grammar: str, says: str
) -> None:
    for episode in await play(client, grammar, timeout=0.1):
        assert (episode.stop, len(episode.turns)) == ("turns", 2)
        for turn in episode.turns:
            (outcome,) = turn.info["outcomes"]
            assert not outcome.ok
            assert says in outcome.content
        check_tokens(episode, grammar, text_model)


async def test_an_answer_without_a_call_ends_it_with_its_score(client: RolloutClient, text_model: Path) -> None:
    for episode in await play(client, r"It is [0-9]\."):
        assert (episode.stop, episode.reward, len(episode.turns)) == ("done", 8.0, 1)
        check_tokens(episode, r"It is [0-9]\.", text_model)
