"""The methods of SkyRLEngine that generate no tokens: scores, embeddings, and ids to text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...messages.errors import InvalidField, JobFailed
from ...messages.model import SamplingParams
from ..calls import similarity
from .core import EngineCore

REWARD, SCORE = "task:reward", "task:score"


class Tasks:
    """Base of SkyRLEngine, which has the part that these methods call."""

    _core: EngineCore

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool = False
    ) -> dict[str, Any]:
        """{"scores": one float for each pair of prompt and answer, "kind": "reward" or "logprob"}.
        input_ids, output_ids: equally many lists of ids, or one list each. kind: "reward" in a pool with a reward
        model, for prompt and answer as one sequence; else "logprob", of the answer after its prompt.
        return_hidden_states: also "hidden_states", for each answer what `generate` would return if it had sampled that
        answer. They are of requests of their own. Raises InvalidField, JobFailed, WaitTimeout, and FeatureUnavailable
        in a pool without both, or without hidden states."""
        prompts, answers = _lists("input_ids", input_ids), _lists("output_ids", output_ids)
        if len(prompts) != len(answers):
            raise InvalidField("output_ids", f"{len(answers)} answers", f"{len(prompts)}, one for each prompt")
        client = await self._core.client()
        workers = await self._core.workers(fresh=False)
        if any(REWARD in worker.features for worker in workers):
            whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
            rewards = await client.reward(whole, timeout=self._core.timeout_s)
            told: dict[str, Any] = {"scores": [result.score for result in rewards], "kind": "reward"}
            return told | (await self._states(prompts, answers) if return_hidden_states else {})
        if error := await self._core.lacking(SCORE):
            raise error
        pairs = zip(prompts, answers, strict=True)
        found = await asyncio.gather(*(client.score(p, [a], timeout=self._core.timeout_s) for p, a in pairs))
        told = {"scores": [results[0].sum for results in found], "kind": "logprob"}
        return told | (await self._states(prompts, answers) if return_hidden_states else {})

    async def _states(self, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
        """{"hidden_states": (t, h) for each answer}, from a generation that is made to sample the answer."""
        if error := await self._core.lacking("hidden_states"):
            raise error
        client = await self._core.client()

        async def states(prompt: list[int], answer: list[int]) -> Any:
            sampling = SamplingParams(max_new_tokens=len(answer), ignore_eos=True)
            dictate = {"name": "forced_tokens", "params": {"token_ids": answer}}
            (group,) = await client.generate(
                [prompt], sampling, hidden_states="all", logit_processors=[dictate], timeout=self._core.timeout_s
            )
            for failure in group.failures:
                raise JobFailed(failure)
            return group.results[0].token_arrays["hidden_states"]

        return {"hidden_states": list(await asyncio.gather(*map(states, prompts, answers)))}

    async def encode(self, texts: Sequence[str] | str, dimensions: int | None = None) -> list[list[float]]:
        """An embedding of each text. dimensions: so many of its first components, for a model trained for it
        (Matryoshka). Raises InvalidField, FeatureUnavailable in a pool without an embedding model, JobFailed,
        WaitTimeout."""
        client = await self._core.client()
        given = [texts] if isinstance(texts, str) else list(texts)
        found = await client.embed(given, dimensions=dimensions, timeout=self._core.timeout_s)
        vectors: list[list[float]] = found.tolist()
        return vectors

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """The embedding of one text; see `encode`."""
        return (await self.encode(text, dimensions))[0]

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Cosine similarity of two texts' embeddings; see `encode`."""
        one, other = await self.encode([text1, text2], dimensions)
        return float(similarity(np.asarray(one), np.asarray(other)))

    async def decode(self, token_ids: Sequence[Any]) -> list[str]:
        """The text of each list of ids, or of one list, without special tokens. Decoded in this process."""
        sequences = _lists("token_ids", token_ids, empty=True)
        texts = await self._core.ready_texts()
        return await asyncio.to_thread(texts.decode_many, sequences)


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
