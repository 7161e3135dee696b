"""The trainer's model: GRPO steps, the versions they make, and a check of the engine's log-probabilities."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch

from . import grpo
from .batch import NO_VERSION, Batch
from .model import token_logprobs
from .task import PROMPT_TOKENS

LEARNING_RATE = 1.3e-3
WARMUP_STEPS = 10
FINAL_SHARE = 0.1
MAX_GRADIENT = 1.0
REMEMBERED = 64


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
        advantage = grpo.advantages(batch.rewards).flatten(0, 1)
        logprobs = token_logprobs(self.model, batch.sequences)[:, PROMPT_TOKENS - 1 :]
        loss = grpo.loss(logprobs, batch.behaviour, advantage, batch.mask)
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
