"""The task: sort four digits; and batches of its samples for training.

The prompt is `<bos>4729=`, the perfect answer `2479<eos>`. Rewards are partial, by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...messages.model import RolloutResult

VOCABULARY = ("<pad>", "<bos>", "<eos>", "<unk>", "=", ",", *"0123456789")
PAD, BOS, EOS, UNK = range(4)
EQUALS = VOCABULARY.index("=")
ZERO = VOCABULARY.index("0")
DIGITS = 4
PROMPT_TOKENS = 1 + DIGITS + 1
ANSWER_TOKENS = DIGITS + 1
NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Problem:
    """Digits to be sorted, each 0 to 9."""

    digits: tuple[int, ...]

    @property
    def text(self) -> str:
        """The prompt as a person reads it, without `<bos>`."""
        return "".join(map(str, self.digits)) + "="

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """(PROMPT_TOKENS,) int32 token ids: what the tokenizer makes of `text`."""
        return np.array([BOS, *(ZERO + digit for digit in self.digits), EQUALS], np.int32)

    @property
    def answer(self) -> npt.NDArray[np.int32]:
        """(ANSWER_TOKENS,) int32 token ids of the sorted digits and `<eos>`."""
        return np.array([*(ZERO + digit for digit in sorted(self.digits)), EOS], np.int32)


def draw(rng: np.random.Generator) -> Problem:
    """A problem with every digit uniform; there are 10**DIGITS of them."""
    return Problem(tuple(int(digit) for digit in rng.integers(0, 10, DIGITS)))


def token_rewards(problem: Problem, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """(ANSWER_TOKENS,) float32: 1 where the answer has the right token, `<eos>` in its place included; 0 elsewhere.

    tokens: (t,) ids of a sample; positions it does not have count as wrong.
    """
    rewards = np.zeros(ANSWER_TOKENS, np.float32)
    given = tokens[:ANSWER_TOKENS]
    rewards[: len(given)] = given == problem.answer[: len(given)]
    return rewards


def reward(rewards: npt.NDArray[np.float32]) -> float:
    """The reward of a sample, 0 to 1: the share of right digits. Ending in the right place is easy and not counted.

    rewards: what `token_rewards` gave.
    """
    return float(rewards[:DIGITS].mean())


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
        """A copy on `device`."""
        tensors = (self.sequences, self.behaviour, self.versions, self.rewards)
        sequences, behaviour, versions, rewards = (tensor.to(device) for tensor in tensors)
        return Batch(sequences, behaviour, versions, rewards, self.reward)

    def head(self, samples: int) -> Batch:
        """The first `samples` samples; rewards are left as they are."""
        return Batch(
            self.sequences[:samples], self.behaviour[:samples], self.versions[:samples], self.rewards, self.reward
        )


def make_batch(groups: Sequence[tuple[Problem, Sequence[RolloutResult]]]) -> Batch:
    """Build a batch. groups: (problem, its n results) each, with the same n for all."""
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
