"""The task: sort four digits. Prompt `<bos>4729=`, perfect answer `2479<eos>`; reward by position."""

from __future__ import annotations

from collections.abc import Sequence
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


def reward(problem: Problem, tokens: Sequence[int] | npt.NDArray[Any]) -> float:
    """Fraction of the DIGITS positions that hold the right digit; 0 for an answer that does not end right after them."""
    answer = problem.answer
    if len(tokens) != ANSWER_TOKENS or int(tokens[-1]) != EOS:
        return 0.0
    return float(np.mean(np.asarray(tokens[:DIGITS]) == answer[:DIGITS]))
