"""The methods of a client that ask a pool for embeddings, scores and rewards; `tasks` says what they do."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ...messages.model import RewardResult, ScoreResult
from . import tasks

if TYPE_CHECKING:
    from ..client import RolloutClient

T = TypeVar("T")


class TaskCalls:
    """For a RolloutClient: see `tasks.embed`, `tasks.score` and `tasks.reward`."""

    async def embed(self, inputs: Sequence[Any], **fields: Any) -> npt.NDArray[np.float32]:
        """(n, d) float32: an embedding of each text, sequence of ids or conversation."""
        return await tasks.embed(cast("RolloutClient", self), inputs, **fields)

    async def score(self, prompt: Any, continuations: Sequence[Any], **fields: Any) -> list[ScoreResult]:
        """How likely each continuation of a prompt is."""
        return await tasks.score(cast("RolloutClient", self), prompt, continuations, **fields)

    async def reward(self, inputs: Sequence[Any], **fields: Any) -> list[RewardResult]:
        """A reward model's scores of each input."""
        return await tasks.reward(cast("RolloutClient", self), inputs, **fields)


class BlockingTaskCalls:
    """The same for a BlockingRolloutClient."""

    _client: RolloutClient

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def embed(self, inputs: Sequence[Any], **fields: Any) -> npt.NDArray[np.float32]:
        """See RolloutClient."""
        return self._run(self._client.embed(inputs, **fields))

    def score(self, prompt: Any, continuations: Sequence[Any], **fields: Any) -> list[ScoreResult]:
        """See RolloutClient."""
        return self._run(self._client.score(prompt, continuations, **fields))

    def reward(self, inputs: Sequence[Any], **fields: Any) -> list[RewardResult]:
        """See RolloutClient."""
        return self._run(self._client.reward(inputs, **fields))
