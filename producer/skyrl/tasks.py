"""What generates nothing: scores, embeddings, and ids to text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...messages.errors import FeatureUnavailable, InvalidField
from ..calls import tasks
from .sessions import SessionMethods

EMBED, REWARD, SCORE = "task:embed", "task:reward", "task:score"


class TaskMethods(SessionMethods):
    """See SkyRLEngine."""

    def supports_scoring(self) -> bool:
        """Whether a worker of the pool has a reward model, or one that can tell how likely it finds an answer."""
        return self.has(REWARD) or self.has(SCORE)

    def supports_embeddings(self) -> bool:
        """Whether a worker of the pool has an embedding model."""
        return self.has(EMBED)

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool = False
    ) -> dict[str, Any]:
        """{"scores": one float for each pair of prompt and answer, "kind": what they are}.

        input_ids, output_ids: lists of lists of ids of the same length, or one list of ids each. kind: "reward" from a
        pool with a reward model, of prompt and answer as one sequence; else "logprob", the log-probability of the
        answer behind its prompt. Raises InvalidField; FeatureUnavailable in a pool that can do neither, and for hidden
        states, which come with `generate`; JobFailed, WaitTimeout.
        """
        if return_hidden_states:
            raise FeatureUnavailable("return_hidden_states", True, "False: hidden states come with generate")
        prompts, answers = _lists("input_ids", input_ids), _lists("output_ids", output_ids)
        if len(prompts) != len(answers):
            raise InvalidField("output_ids", f"{len(answers)} answers", f"{len(prompts)}, one for each prompt")
        client = await self.client()
        await self.workers(fresh=False)
        if self.has(REWARD):
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            rewards = await tasks.reward(client, whole, timeout=self.timeout_s)
            return {"scores": [result.score for result in rewards], "kind": "reward"}
        if error := await self.lacking(SCORE):
            raise error
        pairs = zip(prompts, answers, strict=True)
        found = await asyncio.gather(*(tasks.score(client, p, [a], timeout=self.timeout_s) for p, a in pairs))
        return {"scores": [results[0].sum for results in found], "kind": "logprob"}

    async def encode(self, texts: Sequence[str] | str, dimensions: int | None = None) -> list[list[float]]:
        """An embedding of each text. dimensions: only so many of its first components, of a model trained for it.

        Raises InvalidField, FeatureUnavailable in a pool without an embedding model, JobFailed, WaitTimeout.
        """
        inputs = [texts] if isinstance(texts, str) else list(texts)
        client = await self.client()
        found = await tasks.embed(client, inputs, dimensions=dimensions, timeout=self.timeout_s)
        vectors: list[list[float]] = found.tolist()
        return vectors

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """The embedding of one text; see `encode`."""
        return (await self.encode([text], dimensions))[0]

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Cosine of the angle between two texts' embeddings; see `encode`."""
        one, other = await self.encode([text1, text2], dimensions)
        return float(tasks.similarity(np.asarray(one), np.asarray(other)))

    async def decode(self, token_ids: Sequence[Any], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of ids, or of one list of them, made here with the model's tokenizer."""
        sequences = _lists("token_ids", token_ids, empty=True)
        texts = await self.ready_texts()
        return await asyncio.to_thread(lambda: [texts.decode(ids, skip_special_tokens) for ids in sequences])


def _lists(field: str, value: Any, *, empty: bool = False) -> list[list[int]]:
    """Lists of ids; one list alone is the only one of them."""

    def ids(one: Any) -> list[int]:
        if not isinstance(one, list | tuple | np.ndarray) or (not len(one) and not empty):
            raise InvalidField(field, value, "a list of token ids, or a list of such lists; none empty")
        found = [int(token) for token in one if isinstance(token, int | np.integer)]
        if len(found) != len(one):
            raise InvalidField(field, value, "a list of token ids, or a list of such lists")
        return found

    if isinstance(value, str) or not hasattr(value, "__len__"):
        raise InvalidField(field, value, "a list of token ids, or a list of such lists")
    if len(value) and isinstance(value[0], int | np.integer):
        return [ids(value)]
    return [ids(one) for one in value]
