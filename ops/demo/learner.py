"""The trainer's model: GRPO steps, the versions they make, and a check of the engine's log-probabilities.

GRPO (Shao et al. 2024, arXiv:2402.03300) for samples that older weights drew. Advantages come from the group alone,
without a value network. The importance ratio is taken against the log-probabilities that came back with the samples:
those of the weights that sampled each token, however many versions ago.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from .model import token_logprobs
from .task import NO_VERSION, PROMPT_TOKENS, Batch

LEARNING_RATE = 1.3e-3
WARMUP_STEPS = 10
FINAL_SHARE = 0.1
MAX_GRADIENT = 1.0
REMEMBERED = 64
CLIP_LOW, CLIP_HIGH = 0.2, 0.3
TRUNCATE = 2.0
EPSILON = 1e-3


class Learner:
    """Version v is the model after v steps; version 0 is what the workers loaded from disk.

    steps: how many are planned; the learning rate rises over the first few and falls to a tenth until then.
    """

    def __init__(self, model: Any, steps: int) -> None:
        self.model = model
        self.version = 0
        self._steps = steps
        self._scratch = copy.deepcopy(model).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._states: OrderedDict[int, dict[str, torch.Tensor]] = OrderedDict()
        self._remember()

    def step(self, batch: Batch) -> float:
        """One optimiser step on one batch; returns the loss."""
        batch = batch.to(self.model.device)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * self._rate()
        advantage = advantages(batch.rewards).flatten(0, 1)
        logprobs = token_logprobs(self.model, batch.sequences)[:, PROMPT_TOKENS - 1 :]
        loss = policy_loss(logprobs, batch.behaviour, advantage, batch.mask)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
        self._optimizer.step()
        self.version += 1
        self._remember()
        return float(loss.detach())

    def logprob_gaps(self, batch: Batch) -> torch.Tensor:
        """(k,) float32: |trainer's - engine's log-probability| of every token whose version is still remembered.

        The trainer's is computed again, token by token, with the very version that sampled it.
        """
        gaps, batch = [], batch.to(self.model.device)
        for version in batch.versions.unique().tolist():
            if version == NO_VERSION or version not in self._states:
                continue
            here = batch.versions == version
            rows = here.any(1)
            self._scratch.load_state_dict(self._states[version])
            with torch.no_grad():
                logprobs = token_logprobs(self._scratch, batch.sequences[rows])[:, PROMPT_TOKENS - 1 :]
            gaps.append((logprobs - batch.behaviour[rows]).abs()[here[rows]])
        return torch.cat(gaps).cpu() if gaps else torch.empty(0)

    def _rate(self) -> float:
        rise = min(1.0, (self.version + 1) / (WARMUP_STEPS + 1))
        return rise * max(FINAL_SHARE, 1.0 - (1.0 - FINAL_SHARE) * self.version / self._steps)

    def _remember(self) -> None:
        self._states[self.version] = {name: value.clone() for name, value in self.model.state_dict().items()}
        if len(self._states) > REMEMBERED:
            self._states.popitem(last=False)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """The advantage of each token: how much more its sample earned from there on than the group's mean.

    rewards: (g, n, t) float32, n samples of each of g prompts, a reward for every token. Returns (g, n, t) float32.

    Process supervision as in section 4.1.3 of the paper: a token answers for its own reward and those after it. Here
    that sum is normalised over the group position by position, so that each position has a baseline of its own. Where
    all samples of a group earned the same, the advantage is 0.
    """
    to_come = rewards.flip(-1).cumsum(-1).flip(-1)
    centred = to_come - to_come.mean(1, keepdim=True)
    return centred / (to_come.std(1, unbiased=False, keepdim=True) + EPSILON)


def policy_loss(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
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
