"""A Qwen2-shaped model and its tokenizer. It is small enough to be trained and served on two cores.

A short supervised warm-up makes it a weak policy. That stands for the base model from which RL usually starts.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...worker.cpu_support import prepare_transformers
from ..files import save_model
from ..tiny_model import random_qwen2
from .task import ANSWER_TOKENS, BOS, EOS, PAD, PROMPT_TOKENS, UNK, VOCABULARY, Problem, draw, reward, token_rewards

WIDTH, LAYERS = 64, 2
CONTEXT = 128
TARGET = 0.27
BATCH = 64
LEARNING_RATE = 1e-3
MAX_STEPS = 80
LOOK_EVERY = 2
TRIAL_PROMPTS = 256


def make_model(seed: int) -> Any:
    """A transformers Qwen2ForCausalLM with random float32 weights, about 134 thousand parameters, untied embeddings."""
    small = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "initializer_range": 0.05}
    model = random_qwen2(seed, len(VOCABULARY), WIDTH, LAYERS, max_position_embeddings=CONTEXT, **small)
    return model.to(torch.float32)


def make_tokenizer() -> Any:
    """A fast tokenizer of one token per character; encoding adds `<bos>`."""
    prepare_transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=VOCABULARY[UNK]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{VOCABULARY[BOS]} $A", special_tokens=[(VOCABULARY[BOS], BOS)]
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=VOCABULARY[PAD],
        bos_token=VOCABULARY[BOS],
        eos_token=VOCABULARY[EOS],
        unk_token=VOCABULARY[UNK],
        model_max_length=CONTEXT,
    )


def save_checkpoint(model: Any, directory: Path) -> None:
    """Model and tokenizer as SGLang and AutoTokenizer load them."""
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()  # one file of half a megabyte
    save_model(model, directory)
    make_tokenizer().save_pretrained(directory)


def token_logprobs(model: Any, sequences: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, natural and at temperature 1, of every token given those before it.

    sequences: (b, t) int64, right-padded. Returns (b, t - 1) float32; column i belongs to token i + 1. Padding on the
    right needs no mask: attention is causal.
    """
    logits = model(input_ids=sequences[:, :-1], use_cache=False).logits.float()
    picked = sequences[:, 1:].unsqueeze(-1)
    return torch.log_softmax(logits, -1).gather(-1, picked).squeeze(-1)


def warm_up(model: Any, rng: np.random.Generator) -> dict[str, float]:
    """Supervised steps on worked examples until samples earn `TARGET`; changes `model`.

    Returns the steps, the seconds, and the mean reward of samples drawn after them.
    """
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
    return {"steps": steps, "seconds": round(time.monotonic() - began, 2), "reward": round(earned, 4)}


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
