"""Requests to the engine with a byte-level tokenizer: each byte's token is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.stops.pieces import _BYTE_OF

EOS = 2
PROMPT = (20, 30, 40, 50)
_ids = itertools.count(1)
_ALPHABET = sorted(_BYTE_OF)  # as ops/tiny_model.py numbers them, after three special tokens


class Engine(Protocol):
    async def generate(self, request: EngineRequest) -> EngineOutput: ...


def request(
    *, prompt: tuple[int, ...] = PROMPT, max_new_tokens: int = 200, temperature: float = 0.0, **sampling: Any
) -> EngineRequest:
    """Greedy unless said otherwise."""
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, **sampling)
    return EngineRequest(f"{next(_ids):044x}", np.array(prompt, np.int32), params, max_new_tokens, "0")


def ids_of(text: str) -> tuple[int, ...]:
    """One token for each byte."""
    token_of = {_BYTE_OF[character]: 3 + place for place, character in enumerate(_ALPHABET)}
    return tuple(token_of[byte] for byte in text.encode())


def text_of(tokens: np.ndarray) -> str:
    """Of bytes; special tokens left out."""
    return bytes(_BYTE_OF[_ALPHABET[token - 3]] for token in tokens.tolist() if 3 <= token < 259).decode(
        errors="replace"
    )


async def in_legs(engine: Engine, asked: EngineRequest, *cuts: int) -> EngineOutput:
    """The sample, interrupted after so many tokens and gone on with as another request each time, as one output."""
    prompt, tokens, logprobs = asked.token_ids, np.empty(0, np.int32), np.empty(0, np.float32)
    for end in (*cuts, asked.max_new_tokens):
        leg = replace(
            asked,
            request_id=f"{next(_ids):044x}",
            token_ids=np.concatenate([prompt, tokens]).astype(np.int32),
            max_new_tokens=end - len(tokens),
            generated=len(tokens),
        )
        output = await engine.generate(leg)
        tokens, logprobs = np.concatenate([tokens, output.token_ids]), np.concatenate([logprobs, output.logprobs])
        # SGLang says "length" of one whose very last token is the end.
        if output.finish_reason == "stop" or (not asked.sampling.ignore_eos and tokens[-1:].tolist() == [EOS]):
            break
    return replace(output, token_ids=tokens, logprobs=logprobs)
