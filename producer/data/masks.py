"""Which tokens of an episode are trained on: the model's own are 1, everything it was shown is 0.

Pure functions over turns, for sessions, episodes and trainers alike. A turn is a run of tokens with one origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...messages.errors import InvalidField

Mask = npt.NDArray[np.int8]


class Turn(NamedTuple):
    """`tokens` consecutive tokens; generated: sampled by the model, otherwise a prompt or an observation."""

    tokens: int
    generated: bool


def loss_mask(turns: Sequence[Turn]) -> Mask:
    """(n,) int8 over all tokens of an episode: generated 1, prompt and observations 0. Raises InvalidField."""
    _check(turns)
    values = np.array([turn.generated for turn in turns], dtype=np.int8)
    return np.repeat(values, [turn.tokens for turn in turns])


def prompt_tokens(turns: Sequence[Turn]) -> int:
    """Number of tokens before the first generated turn. Without a generated turn it is the number of all tokens."""
    return sum(turn.tokens for turn in takewhile(lambda turn: not turn.generated, turns))


def response_mask(turns: Sequence[Turn], *, length: int | None = None) -> Mask:
    """`loss_mask` from the first generated token on: what VERL calls response_mask.

    length: pad with 0 up to it. Raises InvalidField if the response is longer.
    """
    mask = loss_mask(turns)[prompt_tokens(turns) :]
    if length is None:
        return mask
    if len(mask) > length:
        raise InvalidField("length", length, f"at least {len(mask)}, the tokens of the response")
    return np.pad(mask, (0, length - len(mask)))


def turn_masks(turns: Sequence[Turn]) -> npt.NDArray[np.int8]:
    """(g, n) int8: row i is 1 at the tokens of generated turn number i, for credit turn by turn."""
    numbers = turn_numbers(turns)
    count = sum(turn.generated for turn in turns)
    return np.asarray(numbers[None, :] == np.arange(count)[:, None], dtype=np.int8)


def turn_numbers(turns: Sequence[Turn]) -> npt.NDArray[np.int32]:
    """(n,) int32: for each token the number of its generated turn, from 0; -1 where the model did not write it.

    Raises InvalidField.
    """
    _check(turns)
    generated = np.array([turn.generated for turn in turns], dtype=bool)
    numbers = np.where(generated, np.cumsum(generated) - 1, -1).astype(np.int32)
    return np.repeat(numbers, [turn.tokens for turn in turns])


def scatter(turns: Sequence[Turn], values: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """(n,) float32: per-turn values of the generated tokens (logprobs) in their places, 0 at all others.

    Raises InvalidField unless there is one array per generated turn, as long as the turn.
    """
    lengths = [turn.tokens for turn in turns if turn.generated]
    if (given := [len(value) for value in values]) != lengths:
        raise InvalidField("values", given, f"arrays of {lengths} values, one for each generated turn")
    placed = np.zeros(sum(turn.tokens for turn in turns), np.float32)
    if values:
        placed[loss_mask(turns).astype(bool)] = np.concatenate(values)
    return placed


def _check(turns: Sequence[Turn]) -> None:
    for place, turn in enumerate(turns):
        if turn.tokens < 0:
            raise InvalidField(f"turns[{place}].tokens", turn.tokens, "0 or more")
