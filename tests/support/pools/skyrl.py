"""What the tests of the SkyRL facade share: a tokenizer of numbers, and an engine over the pool of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from support.pools.pool import eventually

from rolloutmq.producer.skyrl import InferenceEngineOutput, SkyRLEngine
from rolloutmq.worker.scripted.engine import scripted_logprob, scripted_token

SPECIAL = 0


class Numbers:
    """Ids are words: decode([5, 6]) is "5 6"; id 0 is special. A conversation's ids are its characters and a 2."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(str(token) for token in ids if not (skip_special_tokens and token == SPECIAL))

    def apply_chat_template(self, conversation: Any, **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True}
        return [ord(char) for message in conversation for char in message["role"][0] + message["content"]] + [2]


@asynccontextmanager
async def engine(url: str, **settings: Any) -> AsyncIterator[SkyRLEngine]:
    made = SkyRLEngine(url, **({"tokenizer": Numbers(), "timeout_s": 20.0} | settings))
    try:
        yield made
    finally:
        await made.teardown()


async def joined(it: SkyRLEngine, count: int = 1) -> None:
    """Wait until so many workers are in the pool: `worker` returns a moment before."""

    async def all_there() -> bool:
        return len(await (await it.client()).workers()) == count

    await eventually(all_there)


def check_output(output: InferenceEngineOutput, prompts: Sequence[int], adapter: str = "") -> None:
    """Every sample has the tokens, texts and log-probabilities that the scripted engine gives it.

    prompts: how many tokens each sample's prompt has.
    """
    columns = output["request_ids"], output["response_ids"], output["weight_versions"]
    assert output["request_ids"] is not None
    for place, (request, ids, spans) in enumerate(zip(*columns, strict=True)):  # type: ignore[arg-type]
        stream = request[:32] + request[33:]
        versions = [int(span["version"]) for span in spans for _ in range(span["end"] - span["start"])]
        assert len(versions) == len(ids)
        expected = [scripted_token(stream, prompts[place] + i, version, adapter) for i, version in enumerate(versions)]
        assert ids == expected
        assert output["responses"][place] == Numbers().decode(ids, skip_special_tokens=True)
        if output["response_logprobs"] is not None:
            logprobs = output["response_logprobs"][place]
            assert all(abs(a - scripted_logprob(b)) < 1e-6 for a, b in zip(logprobs, ids, strict=True))
