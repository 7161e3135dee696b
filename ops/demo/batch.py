"""Makes a training batch from groups of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...messages.model import RolloutResult
from .task import ANSWER_TOKENS, PAD, PROMPT_TOKENS, Problem, reward, token_rewards

NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """b = g * n samples, those of one prompt in a row; t = ANSWER_TOKENS. Shorter samples are padded on the right.

    sequences: (b, PROMPT_TOKENS + t) int64. behaviour: (b, t) float32 log-probabilities of the weights that sampled.
    versions: (b, t) int64, which weights those were; NO_VERSION where there is no token. rewards: (g, n, t) float32.
    reward: mean over the samples.
    """

    sequences: torch.Tensor
    behaviour: torch.Tensor
    versions: torch.Tensor
    rewards: torch.Tensor
    reward: float

    @property
    def mask(self) -> torch.Tensor:
        """(b, t) float32: 1 for tokens that exist."""
        return (self.versions != NO_VERSION).float()

    def to(self, device: torch.device) -> Batch:
        """The same on `device`."""
        tensors = (self.sequences, self.behaviour, self.versions, self.rewards)
        sequences, behaviour, versions, rewards = (tensor.to(device) for tensor in tensors)
        return Batch(sequences, behaviour, versions, rewards, self.reward)

    def head(self, samples: int) -> Batch:
        """The first `samples` samples; rewards are left as they are."""
        return Batch(
            self.sequences[:samples], self.behaviour[:samples], self.versions[:samples], self.rewards, self.reward
        )


def make_batch(groups: Sequence[tuple[Problem, Sequence[RolloutResult]]]) -> Batch:
    """groups: (problem, its n results); n is the same for all."""
    rows = [(problem, result) for problem, results in groups for result in results]
    sequences = np.full((len(rows), PROMPT_TOKENS + ANSWER_TOKENS), PAD, np.int64)
    behaviour = np.zeros((len(rows), ANSWER_TOKENS), np.float32)
    versions = np.full((len(rows), ANSWER_TOKENS), NO_VERSION, np.int64)
    rewards = np.zeros((len(rows), ANSWER_TOKENS), np.float32)
    for i, (problem, result) in enumerate(rows):
        count = len(result.token_ids)
        assert result.logprobs is not None
        sequences[i, :PROMPT_TOKENS] = problem.prompt
        sequences[i, PROMPT_TOKENS : PROMPT_TOKENS + count] = result.token_ids
        behaviour[i, :count] = result.logprobs
        versions[i, :count] = token_versions(result)
        rewards[i] = token_rewards(problem, result.token_ids)
    return Batch(
        sequences=torch.from_numpy(sequences),
        behaviour=torch.from_numpy(behaviour),
        versions=torch.from_numpy(versions),
        rewards=torch.from_numpy(rewards.reshape(len(groups), -1, ANSWER_TOKENS)),
        reward=float(np.mean([reward(row) for row in rewards])),
    )


def token_versions(result: RolloutResult) -> npt.NDArray[np.int64]:
    """(t,) int64: the weights version that sampled each token."""
    versions, counts = zip(*result.segments, strict=True) if result.segments else ((), ())
    return np.repeat(np.array(versions, np.int64), np.array(counts, np.int64))
