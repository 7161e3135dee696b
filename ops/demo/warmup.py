"""A short supervised warm-up to a weak policy. It stands for the base model that RL usually starts from."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .model import token_logprobs
from .task import ANSWER_TOKENS, EOS, PROMPT_TOKENS, Problem, draw, reward, token_rewards

TARGET = 0.27
BATCH = 64
LEARNING_RATE = 1e-3
MAX_STEPS = 80
LOOK_EVERY = 2
TRIAL_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Warmup:
    """What the supervised phase did. reward: of samples drawn after it."""

    steps: int
    seconds: float
    reward: float


def warm_up(model: Any, rng: np.random.Generator) -> Warmup:
    """Supervised steps on worked examples until samples earn `TARGET`; changes `model`."""
    began = time.monotonic()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    earned, steps = 0.0, 0
    while steps < MAX_STEPS and earned < TARGET:
        examples = [np.concatenate([problem.prompt, problem.answer]) for problem in _problems(rng, BATCH)]
        loss = -token_logprobs(model, _as_batch(examples))[:, PROMPT_TOKENS - 1 :].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % LOOK_EVERY == 0:
            earned = sampled_reward(model, _problems(rng, TRIAL_PROMPTS))
    return Warmup(steps, time.monotonic() - began, earned)


def sampled_reward(model: Any, problems: list[Problem]) -> float:
    """Mean reward of one answer each, sampled at temperature 1 with torch's global generator."""
    sequences = _as_batch([problem.prompt for problem in problems])
    with torch.no_grad():
        for _ in range(ANSWER_TOKENS):
            logits = model(input_ids=sequences, use_cache=False).logits[:, -1].float()
            sequences = torch.cat([sequences, torch.multinomial(torch.softmax(logits, -1), 1)], 1)
    answers = sequences[:, PROMPT_TOKENS:].numpy()
    return float(np.mean([_reward(problem, answer) for problem, answer in zip(problems, answers, strict=True)]))


def _reward(problem: Problem, answer: npt.NDArray[np.int64]) -> float:
    ends = np.flatnonzero(answer == EOS)  # an engine would have stopped at the first one
    return reward(token_rewards(problem, answer[: ends[0] + 1] if len(ends) else answer))


def _problems(rng: np.random.Generator, count: int) -> list[Problem]:
    return [draw(rng) for _ in range(count)]


def _as_batch(rows: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))
