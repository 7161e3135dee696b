"""Calls that generate no tokens: scores, embeddings, and ids to text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...messages.errors import FeatureUnavailable, InvalidField
from ..calls import similarity
from .core import EngineCore

EMBED, REWARD, SCORE = "task:embed", "task:reward", "task:score"


class Tasks:
    """SkyRLEngine documents the methods."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool
    ) -> dict[str, Any]:
        if return_hidden_states:
            raise FeatureUnavailable("return_hidden_states", True, "False: hidden states come with generate")
        prompts, answers = _lists("input_ids", input_ids), _lists("output_ids", output_ids)
        if len(prompts) != len(answers):
            raise InvalidField("output_ids", f"{len(answers)} answers", f"{len(prompts)}, one for each prompt")
        client = await self._core.client()
        await self._core.workers(fresh=False)
        if self._core.has(REWARD):
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            rewards = await client.reward(whole, timeout=self._core.timeout_s)
            return {"scores": [result.score for result in rewards], "kind": "reward"}
        if error := await self._core.lacking(SCORE):
            raise error
        pairs = zip(prompts, answers, strict=True)
        found = await asyncio.gather(*(client.score(p, [a], timeout=self._core.timeout_s) for p, a in pairs))
        return {"scores": [results[0].sum for results in found], "kind": "logprob"}

    async def encode(self, texts: Sequence[str], dimensions: int | None) -> list[list[float]]:
        client = await self._core.client()
        found = await client.embed(texts, dimensions=dimensions, timeout=self._core.timeout_s)
        vectors: list[list[float]] = found.tolist()
        return vectors

    async def similarity(self, text1: str, text2: str, dimensions: int | None) -> float:
        one, other = await self.encode([text1, text2], dimensions)
        return float(similarity(np.asarray(one), np.asarray(other)))

    async def decode(self, token_ids: Sequence[Any], skip_special_tokens: bool) -> list[str]:
        sequences = _lists("token_ids", token_ids, empty=True)
        texts = await self._core.ready_texts()
        return await asyncio.to_thread(lambda: [texts.decode(ids, skip_special_tokens) for ids in sequences])


def _lists(field: str, value: Any, *, empty: bool = False) -> list[list[int]]:
    """`value` as lists of ids. A single list of ids becomes the only list. Raises InvalidField."""

    def ids(one: Any) -> list[int]:
        if not isinstance(one, list | tuple | np.ndarray) or (not len(one) and not empty):
            raise InvalidField(field, value, "a list of token ids, or a list of such lists; none empty")
        found = [
            int(it) for it in one if isinstance(it, int | np.integer) and type(it) is not bool and 0 <= it < 1 << 31
        ]
        if len(found) != len(one):
            raise InvalidField(field, value, "a list of token ids (0 to 2147483647), or a list of such lists")
        return found

    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise InvalidField(field, value, "a list of token ids, or a list of such lists")
    if len(value) and isinstance(value[0], int | np.integer):
        return [ids(value)]
    return [ids(one) for one in value]
