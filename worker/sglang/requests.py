"""One request between this package's form and SGLang's answer: what is refused, and what comes out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from ...messages.errors import EngineError, RequestRefused
from ..engine import NOTHING_MORE, EngineInfo, EngineOutput, EngineRequest, FinishReason, Progress
from ..logit_processors import Registry
from .arrays import Shapes, check_sizes, expert_arrays, hidden_arrays, prompt_arrays, token_rows
from .inside.stops import what_ended


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


def check_wanted(
    request: EngineRequest, info: EngineInfo, shapes: Shapes, processors: Registry, *, deterministic: bool
) -> None:
    """Raises RequestRefused for what it asks for beyond tokens and cannot have.

    deterministic: SGLang samples by seeds.
    """
    if deterministic and request.sampling.min_p > 0:  # SGLang asserts that this is not so
        raise RequestRefused(f"sampling.min_p={request.sampling.min_p}: 0 on a deterministic engine")
    if (wanted := request.wanted) is NOTHING_MORE:
        return
    if wanted.logprobs.top > info.vocab_size:
        raise RequestRefused(f"logprobs.top={wanted.logprobs.top}: this model has {info.vocab_size} tokens")
    _check_ids("logprobs.token_ids", wanted.logprobs.token_ids, info.vocab_size)
    processors.check(wanted.logit_processors, info.vocab_size, greedy=request.sampling.temperature == 0)
    check_sizes(request, shapes)


def engine_output(
    request: EngineRequest, answer: dict[str, Any] | None, logprobs: list[float], state: Any, shapes: Shapes
) -> EngineOutput:
    """SGLang's answer as arrays; None, for a request that never ran, is an abort without tokens.

    state: SGLang's of the request, for one that asked for more logprobs. Raises RequestRefused if a logit processor
    left a token without any choice, EngineError if SGLang did not tell what was asked for.
    """
    if answer is None:
        return EngineOutput(np.empty(0, np.int32), np.empty(0, np.float32), "abort")
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    token_ids = np.array(answer["output_ids"], dtype=np.int32)
    # One for one: an abort can arrive between the two.
    count = min(token_ids.size, len(logprobs))
    values = np.array(logprobs[:count], dtype=np.float32)
    try:
        rows, arrays = _more(request, meta, values, state, shapes) if request.wanted is not NOTHING_MORE else ({}, {})
    except EngineError:
        if reason["type"] != "abort":
            raise
        # It waited, taken back by SGLang: its tokens come without what belongs to them, and are generated again.
        return EngineOutput(np.empty(0, np.int32), np.empty(0, np.float32), "abort")
    matched_stop, stop_tokens, stop_text = what_ended(reason)
    return EngineOutput(
        token_ids=token_ids[:count],
        logprobs=values,
        finish_reason=cast(FinishReason, reason["type"]),
        matched_stop=matched_stop,
        stop_tokens=stop_tokens,
        stop_text=stop_text,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        token_arrays=rows,
        arrays=arrays,
    )


def _more(
    request: EngineRequest, meta: dict[str, Any], logprobs: Any, state: Any, shapes: Shapes
) -> tuple[dict[str, Any], dict[str, Any]]:
    count = len(logprobs)
    _check_choice(request, logprobs)
    states, whole = hidden_arrays(request, meta.get("hidden_states"), count, shapes)
    experts, more = expert_arrays(request, meta.get("routed_experts"), count, shapes)
    # Nothing of the whole without a token: the next leg is asked for it again.
    prompt = prompt_arrays(request, state) if count else {}
    return {**token_rows(request, state, 0, count), **states, **experts}, {**prompt, **whole, **more}


def progress_of(request: EngineRequest, found: tuple[list[int], list[float], Any], start: int) -> Progress | None:
    """What a running request has from token `start` on, or None if that cannot be told without its end.

    found: its tokens and logprobs from `start` on, and SGLang's state of it.
    """
    wanted = request.wanted
    if wanted.hidden_states == "all" or wanted.routed_experts:
        return None
    token_ids, values, state = found
    logprobs = np.array(values, dtype=np.float32)
    if wanted.logit_processors and np.isnan(logprobs).any():
        return None
    rows = token_rows(request, state, start, start + len(token_ids))
    return Progress(np.array(token_ids, dtype=np.int32), logprobs, rows)


def _check_choice(request: EngineRequest, logprobs: Any) -> None:
    """The sampler marks tokens it had no distribution for by a logprob that is no number."""
    if request.wanted.logit_processors and (lost := np.flatnonzero(np.isnan(logprobs))).size:
        names = ", ".join(each.name for each in request.wanted.logit_processors)
        raise RequestRefused(
            f"logit_processors ({names}): failed, or left no token to choose from, at token {int(lost[0])} of this leg"
        )


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"{field} has {token}: token ids of this model are 0 to {vocab_size - 1}")
