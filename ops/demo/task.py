"""The task: sort four digits. Prompt `<bos>4729=`, perfect answer `2479<eos>`, partial reward by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

VOCABULARY = ("<pad>", "<bos>", "<eos>", "<unk>", "=", ",", *"0123456789")
PAD, BOS, EOS, UNK = range(4)
EQUALS = VOCABULARY.index("=")
ZERO = VOCABULARY.index("0")
DIGITS = 4
PROMPT_TOKENS = 1 + DIGITS + 1
ANSWER_TOKENS = DIGITS + 1


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
