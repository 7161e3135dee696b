"""Loss masks of episodes: 1 for tokens that the model generated, 0 for all others.

Pure functions over turns, for sessions, episodes and trainers. A turn is a run of tokens with one origin.
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
    """`tokens` consecutive tokens. generated: the model sampled them; otherwise they are a prompt or an observation."""

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
    """`loss_mask` from the first generated token on. VERL calls it response_mask.

    length: pad with 0 to this length. Raises InvalidField if the response is longer.
    """
    mask = loss_mask(turns)[prompt_tokens(turns) :]
    if length is None:
        return mask
    if len(mask) > length:
        raise InvalidField("length", length, f"at least {len(mask)}, the tokens of the response")
    return np.pad(mask, (0, length - len(mask)))


def turn_masks(turns: Sequence[Turn]) -> npt.NDArray[np.int8]:
    """(g, n) int8: row i is 1 at the tokens of generated turn i. Trainers use it to give each turn its own credit."""
    numbers = turn_numbers(turns)
    count = sum(turn.generated for turn in turns)
    return np.asarray(numbers[None, :] == np.arange(count)[:, None], dtype=np.int8)


def turn_numbers(turns: Sequence[Turn]) -> npt.NDArray[np.int32]:
    """(n,) int32: for each generated token the number of its generated turn, from 0; -1 for all other tokens.

    Raises InvalidField.
    """
    _check(turns)
    generated = np.array([turn.generated for turn in turns], dtype=bool)
    numbers = np.where(generated, np.cumsum(generated) - 1, -1).astype(np.int32)
    return np.repeat(numbers, [turn.tokens for turn in turns])


def scatter(turns: Sequence[Turn], values: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """(n,) float32: values of the generated tokens (logprobs) at their places, 0 at all others.

    values: one array per generated turn, as long as the turn. Raises InvalidField otherwise.
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
