"""GRPO (Shao et al. 2024, arXiv:2402.03300) for samples that older weights drew.

Advantages come from the group alone, no value network. The importance ratio is taken against the log-probabilities that
came back with the samples: those of the weights that really sampled each token, however many versions ago.
"""

from __future__ import annotations

import torch

CLIP_LOW, CLIP_HIGH = 0.2, 0.3
TRUNCATE = 2.0
EPSILON = 1e-3


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better than its group a sample went on from each token.

    rewards: (g, n, t) float32, n samples of each of g prompts, a reward for every token. Returns (g, n, t) float32.

    Process supervision as in section 4.1.3 of the paper: a token answers for its own reward and those after it. Here
    that sum is normalised over the group position by position, so that each position has a baseline of its own. Where
    all samples of a group earned the same, the advantage is 0.
    """
    to_come = rewards.flip(-1).cumsum(-1).flip(-1)
    centred = to_come - to_come.mean(1, keepdim=True)
    return centred / (to_come.std(1, unbiased=False, keepdim=True) + EPSILON)


def loss(logprobs: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Clipped and truncated importance-weighted policy loss, averaged over the tokens of the batch; a scalar.

    logprobs: (b, t) float32, the trainer's, with gradient. behaviour: (b, t), the sampler's. advantage: (b, t).
    mask: (b, t), 1 for tokens that exist.

    Ratios are clipped to [1 - CLIP_LOW, 1 + CLIP_HIGH] (PPO; the higher upper bound as in DAPO, arXiv:2503.14476) and
    never count above TRUNCATE: where the advantage is negative PPO's minimum has no bound, and one stale sample could
    outweigh a batch (dual clip, arXiv:1912.09729).
    """
    ratio = (logprobs - behaviour).exp()
    plain = ratio.clamp(max=TRUNCATE) * advantage
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
    return -(torch.minimum(plain, clipped) * mask).sum() / mask.sum()
