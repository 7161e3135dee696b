"""The demo's learning rule against cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rolloutmq.ops.demo import learner


def test_advantage_is_reward_to_come_normalised_in_the_group() -> None:
    # One group of two samples with two tokens; rewards to come: [2, 1] and [0, 0].
    advantage = learner.advantages(torch.tensor([[[1.0, 1.0], [0.0, 0.0]]]))
    # Means 1 and 0.5, deviations 1 and 0.5.
    first, second = 1 / (1 + learner.EPSILON), 0.5 / (0.5 + learner.EPSILON)
    torch.testing.assert_close(advantage, torch.tensor([[[first, second], [-first, -second]]]))


def test_a_token_does_not_answer_for_rewards_before_it() -> None:
    advantage = learner.advantages(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]))
    assert advantage[0, :, 0].abs().min() > 0.9
    assert advantage[0, :, 1].tolist() == [0.0, 0.0]


def test_a_group_that_agrees_teaches_nothing_and_groups_are_apart() -> None:
    rewards = torch.stack([torch.ones(3, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])])
    advantage = learner.advantages(rewards)
    assert advantage[0].abs().max() == 0.0
    assert advantage[1].abs().max() > 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.1, 2.0, 2.2, 2.2),  # inside the clip range: importance-weighted; d(ratio * A)/d logprob = ratio * A
        (1.8, 1.0, 1 + learner.CLIP_HIGH, 0.0),  # good and already more likely than the range allows: no more push
        (0.5, 1.0, 0.5, 0.5),  # good and less likely: pulled back up
        (0.5, -1.0, -(1 - learner.CLIP_LOW), 0.0),  # bad and already less likely: no more push
        (1.8, -1.0, -1.8, -1.8),  # bad and more likely: pushed down
        (50.0, -1.0, -learner.TRUNCATE, 0.0),  # so stale that its ratio means nothing: truncated
    ],
)
def test_loss_of_one_token(ratio: float, advantage: float, objective: float, slope: float) -> None:
    behaviour = torch.tensor([[-1.5]])
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    loss = learner.policy_loss(logprobs, behaviour, torch.tensor([[advantage]]), torch.ones(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(-objective, rel=1e-5)
    assert logprobs.grad.item() == pytest.approx(-slope, rel=1e-5)


def test_loss_is_a_mean_over_the_tokens_that_exist() -> None:
    zeros = torch.zeros(2, 2)
    advantage = torch.tensor([[1.0, 2.0], [4.0, 100.0]])
    loss = learner.policy_loss(zeros, zeros, advantage, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert loss.item() == pytest.approx(-(1 + 2 + 4) / 3)
