"""A request in SGLang's form: the check before SGLang gets it, SGLang's parameters, and extras for the scheduler.

It makes plain data and imports no SGLang. `_extras` has what SGLang has no parameter for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

from ....messages.errors import RequestRefused
from ....messages.model import GRAMMARS
from ...engine import NOTHING_MORE, EngineInfo, EngineRequest
from ...logit_processors import Registry
from ...stops import check_stops
from ..wire import (
    ALL_STATES,
    GENERATED,
    GRAMMAR,
    LEAST,
    PENALISED,
    PROCESSORS,
    SCALED,
    STOPS,
    STREAM,
    adapter_name,
    pack,
)
from .answer import Shapes, check_sizes

# --- refused ----------------------------------------------------------------------------------------------------------


def check_request(
    request: EngineRequest, info: EngineInfo, shapes: Shapes, processors: Registry, *, deterministic: bool
) -> None:
    """Raise RequestRefused for a request that SGLang would cut off, keep waiting for ever, or crash on.

    deterministic: SGLang samples by seeds.
    """
    _check_tokens(request, info)
    _check_stops(request, info)
    name = _grammar(request)
    if name is not None and f"sampling.{name}" not in info.features:
        raise RequestRefused(f"sampling.{name}: this engine has no tokenizer, which a grammar needs")
    if deterministic and request.sampling.min_p > 0:  # an assertion of SGLang's would fail
        raise RequestRefused(f"sampling.min_p={request.sampling.min_p}: 0 on a deterministic engine")
    if (wanted := request.wanted) is NOTHING_MORE:
        return
    if wanted.logprobs.top > info.vocab_size:
        raise RequestRefused(f"logprobs.top={wanted.logprobs.top}: this model has {info.vocab_size} tokens")
    _check_ids("logprobs.token_ids", wanted.logprobs.token_ids, info.vocab_size)
    processors.check(wanted.logit_processors, info.vocab_size, greedy=request.sampling.temperature == 0)
    check_sizes(request, shapes)


def _check_tokens(request: EngineRequest, info: EngineInfo) -> None:
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
    # An id outside of the vocabulary would index past the embedding and end the scheduler.
    _check_ids("token_ids", (int(tokens.min()), int(tokens.max())), info.vocab_size)
    _check_ids("sampling.stop_token_ids", request.sampling.stop_token_ids, info.vocab_size)
    _check_ids("sampling.logit_bias", request.sampling.logit_bias, info.vocab_size)


def _check_stops(request: EngineRequest, info: EngineInfo) -> None:
    sampling = request.sampling
    check_stops(sampling)
    for name in ("stop", "stop_regex"):
        if getattr(sampling, name) and f"sampling.{name}" not in info.features:
            raise RequestRefused(
                f"sampling.{name}: this engine has no tokenizer; allowed: sampling.stop_token_sequences"
            )
    for sequence in sampling.stop_token_sequences:
        if not all(0 <= token < info.vocab_size for token in sequence):
            raise RequestRefused(
                f"sampling.stop_token_sequences has {sequence}: token ids of this model are 0 to {info.vocab_size - 1}"
            )


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestRefused(f"{field} has {token}: token ids of this model are 0 to {vocab_size - 1}")


def grammar_refusal(request: EngineRequest, message: str) -> str:
    """Return SGLang's reason for a refusal. If the reason is a grammar, the field's name comes first."""
    name = _grammar(request)
    message = message.strip()
    return f"sampling.{name}: {message}" if name is not None and "grammar" in message.lower() else message


def _grammar(request: EngineRequest) -> str | None:
    """Return the name of the sampling parameter that is a grammar, or None."""
    return next((name for name in GRAMMARS if getattr(request.sampling, name) is not None), None)


# --- SGLang's form ----------------------------------------------------------------------------------------------------


def generate_arguments(
    request: EngineRequest, *, marker: Callable[[], str], deterministic: bool = False
) -> dict[str, Any]:
    """Return the arguments of SGLang's GenerateReqInput. SGLang's own streaming is not used; see `_extras`.

    marker: makes the text that marks a request whose extras are for the sampler. deterministic: SGLang samples by
    seeds, and would give all requests without a seed the same one.
    """
    params = _sampling_params(request)
    if deterministic:
        seed = request.wanted.seed
        params["sampling_seed"] = secrets.randbits(63) if seed is None else seed
    if extras := _extras(request):
        params["custom_params"] = pack({**extras, GENERATED: request.generated})
    arguments: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": request.token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "priority": request.priority,
        "extra_key": request.cache_key,
        "lora_path": adapter_name(request.adapter, request.adapter_version) if request.adapter else None,
    }
    if request.wanted is not NOTHING_MORE:
        arguments |= _wanted(request)
    for one in request.media:
        assert one.data is not None  # the worker has fetched it: SGLang opens no path and no URL
        arguments.setdefault(f"{one.kind}_data", []).append(one.data)
    if not extras.keys().isdisjoint({PROCESSORS, SCALED, ALL_STATES}):
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
    if (name := _grammar(request)) is not None:
        params |= {name: getattr(sampling, name), "ignore_eos": False}  # the grammar says where the sample ends
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
        arguments["return_hidden_states"] = "last"  # the sampler collects "all" of them, see ALL_STATES
    if wanted.routed_experts:
        arguments["return_routed_experts"] = True
        # From the pass that samples the first new token on, if what is before it has been delivered.
        arguments["routed_experts_start_len"] = 0 if wanted.prompt else request.token_ids.size - 1
    return arguments


def _extras(request: EngineRequest) -> dict[str, Any]:
    """Return what the scheduler's process needs beyond SGLang's parameters. It is empty for most requests.

    SGLang streams by waking the caller for every token, with everything about the request. On an H200 that costs a
    third of the throughput. So only the scheduler knows that a request streams (STREAM), and reports each of its steps.
    In the worker's process the tokens go to the request's state, where those of every request go every 50 tokens. No
    caller is woken. The worker reads them there (SGLangEngine.progress) when a piece is due.
    """
    sampling, wanted = request.sampling, request.wanted
    parts: dict[str, Any] = {
        PROCESSORS: [[each.name, each.params] for each in wanted.logit_processors],
        SCALED: wanted.logprobs.kind == "scaled" and sampling.temperature > 0,
        ALL_STATES: wanted.hidden_states == "all",
        LEAST: sampling.min_new_tokens,
        STREAM: wanted.stream,
    }
    # SGLang ignores stop tokens with ignore_eos.
    tokens = sampling.stop_token_ids if sampling.ignore_eos else ()
    if sampling.stop or sampling.stop_regex or sampling.stop_token_sequences or tokens:
        parts[STOPS] = [sampling.stop, sampling.stop_regex, sampling.stop_token_sequences, tokens]
    if request.generated:
        penalties = sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
        parts[PENALISED] = penalties != (0.0, 0.0, 1.0)
        parts[GRAMMAR] = _grammar(request) is not None
    return {name: part for name, part in parts.items() if part}
