"""Requests that ask an engine for more than tokens, and transformers as the judge of what comes back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from rolloutmq.messages.model.sampling import LogitProcessor, SamplingParams
from rolloutmq.worker.engine.protocol import EngineRequest, Wanted

_ids = itertools.count(1)


def ask(
    prompt: list[int], count: int, *, generated: int = 0, wanted: Wanted, key: str = "a", **sampling: Any
) -> EngineRequest:
    """`count` more tokens after `prompt`, of which the last `generated` are of an earlier leg."""
    params = SamplingParams(**{"max_new_tokens": generated + count, "ignore_eos": True, **sampling})
    tokens = np.array(prompt, np.int32)
    return EngineRequest(f"{next(_ids):044x}", tokens, params, count, key, generated=generated, wanted=wanted)


def processor(name: str, **params: Any) -> LogitProcessor:
    return LogitProcessor(name=name, params=params)


def judged(model: Any, tokens: list[int], temperature: float = 1.0) -> npt.NDArray[np.float32]:
    """(tokens, vocabulary): row i is the distribution of token i + 1, after `temperature`."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    found: npt.NDArray[np.float32] = torch.log_softmax(logits / temperature, -1).numpy()
    return found


def judged_states(model: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """(tokens, hidden): what the model's head gets at each token."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        found: npt.NDArray[np.float32] = model.model(torch.tensor([tokens])).last_hidden_state[0].float().numpy()
    return found
