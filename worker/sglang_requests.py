"""One request between this package's form and SGLang's answer: what is refused, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from ..messages.errors import RequestRefused
from .engine import EngineInfo, EngineOutput, EngineRequest, FinishReason


def check_request(request: EngineRequest, info: EngineInfo) -> None:
    """Raises RequestRefused for what SGLang would cut short, wait for without end, or crash on."""
    tokens = request.token_ids
    if tokens.ndim != 1 or tokens.size == 0:
        raise RequestRefused(f"token_ids has shape {tokens.shape}: a flat array of at least one token is needed")
    if request.max_new_tokens < 1:
        raise RequestRefused(f"max_new_tokens={request.max_new_tokens}: at least 1")
    total = tokens.size + request.max_new_tokens
    if total > info.context_length:
        raise RequestRefused(
            f"token_ids ({tokens.size}) + max_new_tokens ({request.max_new_tokens}) = {total} tokens: "
            f"at most {info.context_length} fit into this engine's context and KV cache"
        )
    # An id outside of the vocabulary would index past the embedding and take the whole scheduler down.
    _check_ids("token_ids", (int(tokens.min()), int(tokens.max())), info.vocab_size)
    _check_ids("sampling.stop_token_ids", request.sampling.stop_token_ids, info.vocab_size)
    _check_ids("sampling.logit_bias", request.sampling.logit_bias, info.vocab_size)


def engine_output(answer: dict[str, Any] | None, logprobs: list[float]) -> EngineOutput:
    """SGLang's answer as arrays; None, for a request that never ran, is an abort without tokens."""
    if answer is None:
        return EngineOutput(np.empty(0, np.int32), np.empty(0, np.float32), "abort")
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    token_ids = np.array(answer["output_ids"], dtype=np.int32)
    # One for one: an abort can arrive between the two.
    count = min(token_ids.size, len(logprobs))
    matched = reason.get("matched")
    return EngineOutput(
        token_ids=token_ids[:count],
        logprobs=np.array(logprobs[:count], dtype=np.float32),
        finish_reason=cast(FinishReason, reason["type"]),
        matched_stop=matched if isinstance(matched, int) else None,
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"{field} has {token}: token ids of this model are 0 to {vocab_size - 1}")
