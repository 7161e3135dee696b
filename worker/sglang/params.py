"""A request in SGLang's form: sampling parameters, what is to come back, and what the scheduler's process is told.

Plain data: imports no SGLang. Each area has a module of its own that says what a request needs of it; they are brought
together here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from ..engine import NOTHING_MORE, EngineRequest
from ..jobs import media
from . import streaming as sglang_streaming
from .extras import GENERATED, pack
from .inside import grammar as sglang_grammar
from .inside import logits as sglang_logits
from .inside import stops as sglang_stops
from .lora import engine_name

Part = Callable[[EngineRequest], dict[str, Any]]
TOLD: tuple[Part, ...] = (sglang_logits.told, sglang_stops.told, sglang_grammar.told, sglang_streaming.told)
"""Extras for the scheduler's process, by the names that it reads them under; empty for a request without any."""
NATIVE: tuple[Part, ...] = (sglang_grammar.native,)
"""More of SGLang's own sampling parameters."""


def generate_arguments(
    request: EngineRequest, *, marker: Callable[[], str], deterministic: bool = False
) -> dict[str, Any]:
    """Arguments of SGLang's GenerateReqInput. Never streams by SGLang's means, see sglang_streaming.

    marker: makes what a request carries that told the sampler something. deterministic: SGLang samples by seeds, and
    gives all requests without one the same.
    """
    params = _sampling_params(request)
    if deterministic:
        seed = request.wanted.seed
        params["sampling_seed"] = secrets.randbits(63) if seed is None else seed
    extras: dict[str, Any] = {}
    for part in TOLD:
        extras |= part(request)
    if extras:
        params["custom_params"] = pack({**extras, GENERATED: request.generated})
    arguments: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "extra_key": request.cache_key,
        "lora_path": engine_name(request.adapter, request.adapter_version) if request.adapter else None,
    }
    if request.wanted is not NOTHING_MORE:
        arguments |= _wanted(request)
    if request.media:
        arguments |= media.arguments(request.media)
    if sglang_logits.concerns(extras):
        arguments["custom_logit_processor"] = marker()
    return arguments


def _sampling_params(request: EngineRequest) -> dict[str, Any]:
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    for part in NATIVE:
        params |= part(request)
    return params


def _wanted(request: EngineRequest) -> dict[str, Any]:
    wanted, arguments = request.wanted, dict[str, Any]()
    if wanted.logprobs.prompt and wanted.prompt:
        arguments["logprob_start_len"] = 0
    if wanted.logprobs.top:
        arguments["top_logprobs_num"] = wanted.logprobs.top
    if wanted.logprobs.token_ids:
        arguments["token_ids_logprob"] = list(wanted.logprobs.token_ids)
    if wanted.hidden_states != "none":
        arguments["return_hidden_states"] = "last"  # for "all" of them, see sglang_sampler_rows
    if wanted.routed_experts:
        arguments["return_routed_experts"] = True
        # From the pass that samples the first new token on, if what is before it has been delivered.
        arguments["routed_experts_start_len"] = 0 if wanted.prompt else request.token_ids.size - 1
    return arguments
