"""Turns SGLang's answer to one request into the arrays and reasons of the engine protocol."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ....messages.errors import EngineError, RequestRefused
from ....messages.model import too_large
from ...engine import NOTHING_MORE, EngineOutput, EngineRequest, FinishReason, Generated, MatchedStop
from ..wire import STOP_TEXT, STOP_TOKENS

LOGPROBS, INPUT_LOGPROBS, STATE = "rolloutmq_output_logprobs", "rolloutmq_input_logprobs", "rolloutmq_state"
"""Entries of `meta_info` that `launch.Manager` adds: two lists of logprobs as SGLang has them and, if the request asked
for more logprobs than those of its tokens, SGLang's state of the request."""
NO_TOKEN = -1
"""The value of "prompt_top_ids" for the first token, which nothing predicted."""
MASKED = -1e20
"""Logprobs below this are of impossible tokens: SGLang has -1e30 or less, divided by a temperature up to 100."""
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a model's arrays. dtype: of its hidden states, by torch's name.

    layers, experts: layers, and experts of a token in each; 0 without experts. among: experts of a layer; 0 if unknown.
    """

    hidden: int = 0
    dtype: str = "float32"
    layers: int = 0
    experts: int = 0
    among: int = 0

    @property
    def state_dtype(self) -> np.dtype[Any]:
        """The dtype in which hidden states travel. bfloat16 travels as its bits, in uint16."""
        return np.dtype({"bfloat16": "uint16", "float16": "float16"}.get(self.dtype, "float32"))

    @property
    def expert_dtype(self) -> np.dtype[Any]:
        """The smallest dtype that has the number of every expert."""
        return np.min_scalar_type(self.among - 1) if self.among else np.dtype(np.int32)


# --- SGLang's records -------------------------------------------------------------------------------------------------


def generated_so_far(manager: Any, request_id: str, start: int) -> tuple[list[int], list[float], Any] | None:
    """Return a running request's ids and logprobs from token `start` on, as far as reported, and SGLang's state of it.

    Returns None if the request does not run. The scheduler reports every SGLANG_FORCE_STREAM_INTERVAL (50) tokens, also
    of a request that does not stream.
    """
    state = manager.rid_to_state.get(request_id)
    if state is None or state.finished:
        return None
    token_ids, logprobs = state.output_ids, state.output_token_logprobs_val
    count = min(len(token_ids), len(logprobs))
    return token_ids[start:count], logprobs[start:count], state


def _aborted() -> EngineOutput:
    """Return an abort without tokens."""
    return EngineOutput(np.empty(0, np.int32), np.empty(0, np.float32), "abort")


# --- outputs ----------------------------------------------------------------------------------------------------------


def engine_output(request: EngineRequest, answer: dict[str, Any] | None, shapes: Shapes) -> EngineOutput:
    """Return SGLang's answer as arrays. None, for a request that never ran, becomes an abort without tokens.

    Raises RequestRefused if a logit processor left no token to choose from, and EngineError if SGLang did not answer
    everything that was asked for.
    """
    if answer is None:
        return _aborted()
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    token_ids, logprobs = np.array(answer["output_ids"], dtype=np.int32), meta.get(LOGPROBS, [])
    # An abort can come between the two lists, so both are cut to the shorter one.
    count = min(token_ids.size, len(logprobs))
    values = np.array(logprobs[:count], dtype=np.float32)
    try:
        rows, arrays = _more(request, meta, values, shapes) if request.wanted is not NOTHING_MORE else ({}, {})
    except EngineError:
        if reason["type"] != "abort":
            raise
        # SGLang had retracted it: its tokens come without the other arrays. They are generated again.
        return _aborted()
    matched_stop, stop_tokens, stop_text = _what_ended(reason)
    return EngineOutput(
        token_ids=token_ids[:count],
        logprobs=values,
        finish_reason=cast(FinishReason, reason["type"]),
        matched_stop=matched_stop,
        stop_tokens=stop_tokens,
        stop_text=stop_text,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        retracted=bool(meta.get("num_retractions")),
        token_arrays=rows,
        arrays=arrays,
    )


def _more(
    request: EngineRequest, meta: dict[str, Any], logprobs: Any, shapes: Shapes
) -> tuple[dict[str, Any], dict[str, Any]]:
    count, state = len(logprobs), meta.get(STATE)
    _check_choice(request, logprobs)
    states, whole = _hidden_arrays(request, meta.get("hidden_states"), count, shapes)
    experts, more = _expert_arrays(request, meta.get("routed_experts"), count, shapes)
    # Without a token there are no arrays of the whole sample. The next leg asks for them again.
    prompt = _prompt_arrays(request, state) if count else {}
    return {**_token_rows(request, state, 0, count), **states, **experts}, {**prompt, **whole, **more}


def progress_of(request: EngineRequest, found: tuple[list[int], list[float], Any], start: int) -> Generated | None:
    """Return what a running request has from token `start` on, or None if that is only known at its end.

    found: its tokens and logprobs from `start` on, and SGLang's state of it.
    """
    wanted = request.wanted
    if wanted.hidden_states == "all" or wanted.routed_experts:
        return None
    token_ids, values, state = found
    logprobs = np.array(values, dtype=np.float32)
    if wanted.logit_processors and np.isnan(logprobs).any():
        return None
    rows = _token_rows(request, state, start, start + len(token_ids))
    return Generated(np.array(token_ids, dtype=np.int32), logprobs, rows)


def _check_choice(request: EngineRequest, logprobs: Any) -> None:
    """Raise RequestRefused for a NaN: the sampler had no distribution to draw that token from."""
    if request.wanted.logit_processors and (lost := np.flatnonzero(np.isnan(logprobs))).size:
        names = ", ".join(each.name for each in request.wanted.logit_processors)
        raise RequestRefused(
            f"logit_processors ({names}): failed, or left no token to choose from, at token {int(lost[0])} of this leg"
        )


def _what_ended(reason: dict[str, Any]) -> tuple[MatchedStop | None, int, str]:
    """Return `matched_stop`, `stop_tokens` and `stop_text` of an EngineOutput, from SGLang's finish reason."""
    matched = reason.get("matched")
    if STOP_TOKENS in reason:
        stop = tuple(matched) if isinstance(matched, list) else matched
        return stop, int(reason[STOP_TOKENS]), str(reason[STOP_TEXT])
    return (matched, 1, "") if isinstance(matched, int) else (None, 0, "")


# --- arrays -----------------------------------------------------------------------------------------------------------


def check_sizes(request: EngineRequest, shapes: Shapes) -> None:
    """Raise RequestRefused if the arrays could be larger than a result may carry."""
    wanted, most = request.wanted, request.sampling.max_new_tokens
    prompt = request.token_ids.size - request.generated
    sizes = wanted.logprobs.sizes(most, prompt)
    if wanted.hidden_states == "all":
        sizes.append(("hidden_states", shapes.hidden * shapes.state_dtype.itemsize, most))
    if wanted.routed_experts:
        width = shapes.layers * shapes.experts * shapes.expert_dtype.itemsize
        sizes.append(("routed_experts", width, most + prompt))
    if refused := too_large(sizes):
        raise RequestRefused(refused)


def _token_rows(request: EngineRequest, state: Any, start: int, end: int) -> dict[str, Array]:
    """Return the logprobs asked for, of tokens `start` to `end` of this leg.

    state: SGLang's of the request, or None.
    """
    logprobs, rows = request.wanted.logprobs, dict[str, Array]()
    if state is None or end <= start:
        return rows
    if logprobs.top:
        rows["top_ids"] = np.array(state.output_top_logprobs_idx[start:end], np.int32)
        rows["top_logprobs"] = _logprobs(state.output_top_logprobs_val[start:end])
    if logprobs.token_ids:
        rows["id_logprobs"] = _logprobs(state.output_token_ids_logprobs_val[start:end])
    return rows


def _prompt_arrays(request: EngineRequest, state: Any) -> dict[str, Array]:
    """Return the logprobs asked for, of the prompt's own tokens, without those that earlier legs generated."""
    logprobs, count = request.wanted.logprobs, request.token_ids.size - request.generated
    if not (logprobs.prompt and request.wanted.prompt) or state is None or not state.input_token_logprobs_val:
        return {}
    known = [[value] for value in state.input_token_logprobs_val[1:count]]
    arrays = {"prompt_logprobs": _after_first(known, 1)[:, 0]}
    if logprobs.top:
        ids = [[NO_TOKEN] * logprobs.top, *state.input_top_logprobs_idx[1:count]]
        arrays["prompt_top_ids"] = np.array(ids, np.int32)
        arrays["prompt_top_logprobs"] = _after_first(state.input_top_logprobs_val[1:count], logprobs.top)
    if logprobs.token_ids:
        known = state.input_token_ids_logprobs_val[1:count]
        arrays["prompt_id_logprobs"] = _after_first(known, len(logprobs.token_ids))
    if len(arrays["prompt_logprobs"]) != count:
        raise EngineError(f"SGLang told {len(arrays['prompt_logprobs'])} logprobs of a prompt of {count} tokens")
    return arrays


def _hidden_arrays(
    request: EngineRequest, found: Any, count: int, shapes: Shapes
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return rows for `count` tokens, and arrays of the whole.

    found: SGLang's hidden states of the last or each token.
    """
    wanted = request.wanted.hidden_states
    if wanted == "none" or not count:
        return {}, {}
    if not found:
        raise EngineError(f"SGLang told no hidden states of {count} tokens")
    if wanted == "last":
        return {}, {"last_hidden_state": _packed(found, shapes)}
    if len(found) < count:
        raise EngineError(f"SGLang told {len(found)} hidden states of {count} tokens")
    return {"hidden_states": _packed(found[:count], shapes)}, {}


def _expert_arrays(
    request: EngineRequest, found: Any, count: int, shapes: Shapes
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return rows for `count` tokens, and arrays of the whole. found: SGLang's table, a row per token but the last.

    The row of a generated token is that of the forward pass that sampled it. So the first generated token has the row
    of the prompt's last token.
    """
    if not request.wanted.routed_experts or not count:
        return {}, {}
    if found is None:
        raise EngineError(f"SGLang told no routed experts of {count} tokens")
    data = base64.b64decode(found) if isinstance(found, str) else np.asarray(found, np.int32).tobytes()
    table = np.frombuffer(data, "<i4").reshape(-1, shapes.layers, shapes.experts).astype(np.int32)
    if table.min(initial=0) >= 0 and table.max(initial=0) <= np.iinfo(shapes.expert_dtype).max:
        table = table.astype(shapes.expert_dtype)
    before = request.token_ids.size - 1 if request.wanted.prompt else 0
    if len(table) < before + count:
        raise EngineError(f"SGLang told the experts of {len(table)} tokens, of {before + count} at least")
    arrays: dict[str, Array] = {}
    if request.wanted.prompt:
        arrays["prompt_routed_experts"] = table[: request.token_ids.size - request.generated]
    return {"routed_experts": table[before : before + count]}, arrays


def _packed(states: Sequence[Any], shapes: Shapes) -> Array:
    array = np.array(states, np.float32)
    if shapes.state_dtype == np.uint16:
        return (array.view(np.uint32) >> 16).astype(np.uint16)  # exact: they are bfloat16 numbers
    return array.astype(shapes.state_dtype)


def _logprobs(rows: Sequence[Any]) -> npt.NDArray[np.float32]:
    array = np.array(rows, np.float32)
    array[array < MASKED] = -np.inf
    return array


def _after_first(rows: Sequence[Any], width: int) -> npt.NDArray[np.float32]:
    return np.concatenate([np.full((1, width), np.nan, np.float32), _logprobs(rows).reshape(-1, width)])
