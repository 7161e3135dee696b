"""Which tokens of an episode count, turn by turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.messages.errors import InvalidField
from rolloutmq.producer.data import Turn, loss_mask, prompt_tokens, response_mask, scatter, turn_masks, turn_numbers

EPISODE = [Turn(3, False), Turn(2, True), Turn(2, False), Turn(1, True)]
turns = st.lists(st.builds(Turn, st.integers(0, 6), st.booleans()), max_size=12)


def test_generated_tokens_are_one_and_what_the_model_was_shown_is_zero() -> None:
    assert loss_mask(EPISODE).tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert loss_mask(EPISODE).dtype == np.int8
    assert prompt_tokens(EPISODE) == 3
    assert response_mask(EPISODE).tolist() == [1, 1, 0, 0, 1]
    assert response_mask(EPISODE, length=7).tolist() == [1, 1, 0, 0, 1, 0, 0]


def test_turns_are_told_apart() -> None:
    assert turn_numbers(EPISODE).tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert turn_masks(EPISODE).tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1]]
    placed = scatter(EPISODE, [np.array([-1, -2], np.float32), np.array([-3], np.float32)])
    assert placed.tolist() == [0, 0, 0, -1, -2, 0, 0, -3]


@given(turns)
def test_masks_agree_with_each_other(episode: list[Turn]) -> None:
    mask = loss_mask(episode)
    assert len(mask) == sum(turn.tokens for turn in episode)
    assert mask.sum() == sum(turn.tokens for turn in episode if turn.generated)
    np.testing.assert_array_equal(turn_masks(episode).sum(0, dtype=np.int8), mask)
    np.testing.assert_array_equal(turn_numbers(episode) >= 0, mask == 1)
    assert not mask[: prompt_tokens(episode)].any()
    assert len(response_mask(episode)) + prompt_tokens(episode) == len(mask)
    values = [np.arange(1, turn.tokens + 1, dtype=np.float32) for turn in episode if turn.generated]
    np.testing.assert_array_equal(scatter(episode, values) > 0, mask == 1)


def test_an_episode_without_turns_or_without_an_answer_has_an_empty_response() -> None:
    assert loss_mask([]).tolist() == response_mask([]).tolist() == []
    assert response_mask([Turn(4, False)]).tolist() == []


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(InvalidField, match=r"turns\[1\]\.tokens=-1"):
        loss_mask([Turn(1, True), Turn(-1, False)])
    for numbered in (turn_numbers, turn_masks):
        with pytest.raises(InvalidField, match=r"turns\[0\]\.tokens=-1"):
            numbered([Turn(-1, True)])
    with pytest.raises(InvalidField, match="length=2"):
        response_mask(EPISODE, length=2)
    with pytest.raises(InvalidField, match="values"):
        scatter(EPISODE, [np.zeros(2, np.float32)])
